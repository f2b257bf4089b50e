"""Every installed metric returns a documented value or NaN for every tensor, and never raises."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export import subscriber as installed
from ikkuna.export.messages import MessageBus
from ikkuna.numerics.statistics import merge
from ikkuna.numerics.statistics.host import measure
from ikkuna.store.values import Matrix
from ikkuna.testing import RecordingBackend, check_subscriber, small_model
from tests.metrics.running import watched
from tests.subscribers import EVERY_SUBSCRIBER, NEEDS


def odd_tensors():
    """Return tensors that are not in `special_tensors`, because third-party metrics need not support them."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    duplicate = x.clone()
    duplicate[:, 1], duplicate[:, 2] = duplicate[:, 0], 0.0
    return {
        "one element": x[:1, :1].clone(),
        "one row": x[:1].clone(),
        "one column": x[:, :1].clone(),
        "no column": x[:, :0].clone(),
        "signed zeros": torch.tensor([[0.0, -0.0], [-0.0, 0.0]]),
        "one infinity": torch.where(x == x[0, 0], math.inf, x),
        "all infinite": torch.full_like(x, -math.inf),
        "huge": torch.full_like(x, 1e30),
        "duplicate and dead columns": duplicate,
        "fewer rows than columns": x[:2].clone(),
        "float8": x.to(torch.float8_e5m2),
        "booleans": x > 0,
        "small integers": (10 * x).to(torch.int8),
        "bytes": (10 * x.abs()).to(torch.uint8),
        "complex": torch.complex(x, -x),
        "sparse": (x * (x > 0)).to_sparse(),
        "channels last": x.reshape(1, 6, 2, 2).contiguous(memory_format=torch.channels_last),
        "five axes": x.reshape(2, 3, 2, 2, 1),
        "without data": x.to("meta"),
    }


@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_every_subscriber_accepts_odd_tensors(name):
    check_subscriber(EVERY_SUBSCRIBER[name], NEEDS.get(name, ()), odd_tensors())


class Varying(nn.Module):
    """Accepts batches of every size and shape."""

    def __init__(self):
        super().__init__()
        self.inner = small_model()

    def forward(self, x):
        return self.inner(x).flatten(0, -2)


@pytest.mark.parametrize("name", EVERY_SUBSCRIBER)
def test_every_subscriber_accepts_changing_shapes(name):
    """Batches of another size, with another number of axes, none at all, and weights of another shape and dtype."""
    recording, bus, model = RecordingBackend(), MessageBus(), Varying()
    loss = nn.CrossEntropyLoss(reduction="sum")
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        for make in (*NEEDS.get(name, ()), EVERY_SUBSCRIBER[name]):
            if name.startswith("TestAccuracy"):
                continue  # which has a model of its own to call
            bus.register_subscriber(make(backend=recording))
        for step, shape in enumerate([(8, 4), (1, 4), (2, 3, 4), (0, 4), (5, 4), (5, 4)]):
            if step == 4:
                model.inner.last = nn.Linear(8, 7)
                exporter.epoch_finished()
            if step == 5:
                model.to(torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            x = torch.ones(shape, dtype=next(model.parameters()).dtype)
            rows = x.numel() // 4
            loss(model(x), torch.zeros(rows, dtype=torch.long)).backward()
            optimizer.step()
        assert not exporter.health().errors
    assert all(isinstance(value, (float, str, Matrix)) or value.num for _, value, _ in recording.values)


NAN = math.nan
UNDEFINED = {  # the values for activations with a NaN, with an infinity, and for an empty tensor; None for no value
    "NormSubscriber": (NAN, NAN, None),
    "MeanSubscriber": (NAN, NAN, None),
    "SumSubscriber": (NAN, NAN, None),
    "VarianceSubscriber": (NAN, NAN, None),
    "MinMaxSubscriber": (NAN, math.inf, None),
    "MomentsSubscriber": (NAN, NAN, None),
    "SpectralNormSubscriber": (NAN, NAN, NAN),
    "ConditionNumberSubscriber": (NAN, NAN, None),
    "RankSubscriber": (NAN, NAN, None),
    "AlphaSubscriber": (NAN, NAN, None),
    "NonFiniteSubscriber": (1.0, 1.0, None),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_values_for_a_nan_an_infinity_and_an_empty_tensor(name):
    x = torch.arange(1.0, 13.0).reshape(4, 3)
    with_nan, with_inf = x.clone(), x.clone()
    with_nan[1, 1], with_inf[1, 1] = NAN, math.inf
    for tensor, expected in zip((with_nan, with_inf, x[:0]), UNDEFINED[name], strict=True):
        found = watched(lambda **o: getattr(installed, name)("activations", **o), tensor)
        values = [value for kind in found.values() for value in kind]
        assert values if expected is not None else not values
        if name == "MinMaxSubscriber" and values:
            values = values[1:]  # an infinity has no part in the minimum
        assert all(value == expected or (math.isnan(value) and math.isnan(expected)) for value in values), values


ORDERS = pytest.mark.parametrize("p", [0, 1, 2, 3, math.inf])


@pytest.mark.fault(210)
@ORDERS
@pytest.mark.parametrize("broken", [[math.nan], [math.inf], [-math.inf], [math.nan, math.inf]])
def test_a_norm_of_finite_elements_leaves_out_the_others(p, broken):
    """Norms of every order, merged over calls, and of a call without a finite element."""
    calls = [torch.tensor([1.0, 0.0, -3.0, *broken]), torch.tensor(broken)]
    found = watched(lambda **o: installed.NormSubscriber("activations", p, finite_only=True, **o), calls, calls[1:])
    expected = {0: 2.0, 1: 4.0, 2: math.sqrt(10), 3: 28 ** (1 / 3), math.inf: 3.0}[p]
    merged, without = found[f"activations_norm{p:g}"]
    assert merged == pytest.approx(expected, rel=1e-12)
    assert math.isnan(without) if p == math.inf else without == 0.0


def test_the_largest_finite_magnitude_of_a_sparse_tensor_may_be_a_zero_that_is_not_stored():
    for stored, expected in (([math.inf, math.nan, 0.0], 0.0), ([math.nan, -2.0, 0.0], 2.0)):
        x = torch.tensor(stored).to_sparse()
        make = installed.NormSubscriber
        found = watched(lambda **o: make("activations", math.inf, finite_only=True, **o), x)  # noqa: B023
        assert found["activations_norminf"] == [expected]


@pytest.mark.fault(210)
@ORDERS
@pytest.mark.parametrize("others", [[], [lambda **o: installed.MeanSubscriber("activations", **o)]])
def test_a_norm_of_data_with_an_infinity_does_not_depend_on_other_subscribers(p, others):
    recording, bus, model = RecordingBackend(), MessageBus(), nn.Identity()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for make in (lambda **o: installed.NormSubscriber("activations", p, **o), *others):
            bus.register_subscriber(make(backend=recording))
        model(torch.tensor([1.0, -math.inf]))
        exporter.step()
    [value] = [value for series, value, _ in recording.values if "_norm" in series.kind]
    assert math.isnan(value)


@ORDERS
@pytest.mark.parametrize("finite_only", [False, True])
def test_a_norm_of_an_empty_tensor_publishes_nothing(p, finite_only):
    make = installed.NormSubscriber
    assert not watched(lambda **o: make("activations", p, finite_only=finite_only, **o), torch.ones(0, 3))


def test_counts_go_beyond_32_bits():
    x = torch.tensor([0.0, math.nan, math.inf, 2.0])
    record = measure(x, frozenset(("n", "zeros", "nans", "infs")))
    assert record is not None
    count = 2**33 + 1
    many = merge(replace(record, n=4 * count, zeros=count, nans=count, infs=count), record)
    assert (many.n, many.zeros, many.nans, many.infs) == (4 * (2**33 + 2), 2**33 + 2, 2**33 + 2, 2**33 + 2)
