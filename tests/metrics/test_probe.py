"""The probe set and its evaluations: they change nothing, and report why they fail."""

import math

import pytest
import torch
from ikkuna_subscribers._helpers import ProbeData
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, CKASubscriber, LayerSaturationSubscriber
from ikkuna.testing import RecordingBackend
from tests.metrics.probing import evaluated, unchanged
from tests.metrics.running import curves


class Augmented(Dataset):
    """Items that change at random."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.randn(4) + index, index


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))


def test_items_are_chosen_once_without_replacement_and_stay_the_same():
    data = ProbeData("Some", Augmented(), samples=7, batch_size=3)
    first, again = ([inputs for inputs, _ in data] for _ in range(2))
    chosen = torch.cat([labels for _, labels in data]).tolist()
    assert len(data) == len(set(chosen)) == 7
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = torch.cat([labels for _, labels in ProbeData("Some", Augmented(), samples=7, seed=1)]).tolist()
    assert other != chosen


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TensorDataset(torch.ones(0, 4)),), ConfigError, "a data set with at least one item, got an empty one"),
        ((torch.ones(5, 4), 6), ConfigError, "got samples=6, but the probe set has 5 items"),
        ((torch.ones(5, 4), 0), ConfigError, "needs samples >= 1, got 0"),
        ((torch.ones(5, 4), None, 0), ConfigError, "needs batch_size >= 1, got 0"),
        ((torch.ones(5, 4), None, True), ConfigError, "needs batch_size >= 1, got True"),
        ((torch.ones(()),), ConfigTypeError, "or a tensor, got Tensor"),
        (({"x": 1},), ConfigTypeError, "got dict"),
        ((DataLoader(torch.ones(5, 4)),), ConfigTypeError, "map-style data set, .* got DataLoader"),
    ],
)
def test_a_bad_probe_set_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"Some .*{message}"):
        ProbeData("Some", *arguments)


def test_a_schedule_is_in_steps_or_in_epochs():
    with pytest.raises(ConfigError, match=r"CKASubscriber needs every >= 1, got 0"):
        CKASubscriber(torch.ones(5, 4), every=0)
    with pytest.raises(ConfigError, match=r"takes every= or subsample=, got both"):
        CKASubscriber(torch.ones(5, 4), every=2, subsample=2)


def test_the_first_evaluation_changes_nothing_and_reaches_no_subscriber():
    m, seen = model(), []
    state = {name: value.clone() for name, value in m.state_dict().items()}
    random = torch.get_rng_state()
    bus = MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(m)
        bus.register_subscriber(CallbackSubscriber(["activations", "batch_started"], seen.append, tag=None))
        bus.register_subscriber(CKASubscriber(Augmented(), backend="null"))
        assert exporter.health().steps == 0
    assert not seen
    assert all(torch.equal(state[name], value) for name, value in m.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in m.modules())
    assert not any(module._forward_hooks for module in m.modules())


def test_suspending_inside_a_subscriber_ends_with_it():
    """A metric that evaluates the model unseen must not blind the exporter for good."""
    m, seen = model(), []
    bus = MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(m)
        bus.register_subscriber(CKASubscriber(torch.randn(9, 4), every=1, backend="null"))
        bus.register_subscriber(CallbackSubscriber("weights", seen.append, modules="0"))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            m(torch.randn(5, 4)).sum().backward()
            optimizer.step()
    assert [message.global_step for message in seen] == [0, 1, 2]


def test_an_evaluation_without_a_name_reaches_no_subscriber():
    m, seen, bus = model(), [], MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(m)
        bus.register_subscriber(CallbackSubscriber("activations", seen.append, tag=None))
        outputs = []
        exporter.evaluate([torch.ones(2, 4)], None, visit=lambda output, label: outputs.append(output))
        assert len(outputs) == 1
        assert not seen
        exporter.evaluate([torch.ones(2, 4)])
        assert len(seen) == 4


class Keywords(nn.Module):
    """A model whose forward takes other arguments."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, *, values, scale):
        return self.fc(values) * scale


def test_a_model_that_takes_other_arguments_needs_a_forward():
    with pytest.raises(
        ConfigError, match=r"CKASubscriber cannot evaluate this model: TypeError: .*give forward= a function"
    ):
        evaluated(lambda **o: CKASubscriber(torch.randn(9, 4), **o), Keywords())
    found = evaluated(
        lambda **o: CKASubscriber(torch.randn(9, 4), forward=lambda m, x: m(values=x, scale=2.0), every=1, **o),
        *(Keywords(), unchanged),
    )
    assert found["cka_to_init", "fc"] == [pytest.approx(1.0)]


def test_items_may_be_the_arguments_themselves():
    class Items(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"values": torch.eye(8)[index, :4] + index, "scale": 1.0}

    found = evaluated(lambda **o: LayerSaturationSubscriber(Items(), every=1, **o), _with_vector_scale(), unchanged)
    assert 1 <= found["intrinsic_dimension", "fc"][0] <= 6


def _with_vector_scale():
    m = Keywords()
    m.forward = lambda values, scale: m.fc(values) * scale[:, None]
    return m


def test_a_refused_registration_leaves_the_bus_unchanged():
    bus = MessageBus()
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(Keywords())
        metric = CKASubscriber(torch.randn(9, 4), backend="null")
        with pytest.raises(ConfigError, match="cannot evaluate"):
            bus.register_subscriber(metric)
        assert not bus.registered
        metric.forward = lambda m, x: m(values=x, scale=1.0)
        bus.register_subscriber(metric)


def test_a_model_that_is_added_later_is_compared_with_its_first_evaluation():
    recording, bus = RecordingBackend(), MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        CKASubscriber(torch.randn(9, 4), every=1, backend=recording, message_bus=bus)
        m = exporter(model())
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            m(torch.randn(5, 4)).sum().backward()
            optimizer.step()
    assert len(curves(recording)["cka_to_init", "0"]) == 1


def test_a_lazy_model_is_not_initialised_by_an_evaluation():
    m = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2))
    bus = MessageBus()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(m)
        bus.register_subscriber(CKASubscriber(torch.randn(9, 4), backend="null"))
        assert nn.parameter.is_lazy(m[0].weight)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_is_refused_first_and_nan_with_a_reason_later(error, caplog):
    def fail(m, x):
        raise error

    with pytest.raises(ConfigError, match="take fewer samples= or a smaller batch_size="):
        evaluated(lambda **o: CKASubscriber(torch.randn(9, 4), forward=fail, **o), model())
    metric = []

    def make(**options):
        metric.append(CKASubscriber(torch.randn(9, 4), every=1, **options))
        return metric[0]

    def lose_memory(m):
        metric[0].forward = fail

    found = evaluated(make, model(), unchanged, lose_memory)
    assert [math.isnan(v) for v in found["cka_to_init", "0"]] == [False, True]
    assert [math.isnan(v) for v in found["cka_between_layers", "3"]] == [False, True]
    assert "take fewer samples=" in caplog.text


def test_a_skipped_step_is_not_evaluated():
    recording, bus = RecordingBackend(), MessageBus()
    m = model()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(m)
        bus.register_subscriber(CKASubscriber(torch.randn(9, 4), every=1, backend=recording))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (1.0, math.inf):
            optimizer.zero_grad()
            scaler.scale((m(torch.ones(3, 4)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(curves(recording)["cka_to_init", "0"]) == 1


def test_every_second_step_is_evaluated_with_every_2():
    found = evaluated(lambda **o: CKASubscriber(torch.randn(9, 4), every=2, **o), model(), *[unchanged] * 5)
    assert len(found["cka_to_init", "0"]) == 3


class Positional(nn.Module):
    """A class of one's own: a bare `Sequential` is not compiled in place."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.fc(x).relu())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_evaluated_uncompiled(in_place):
    """Compiled code would know nothing of hooks that come and go, or be compiled again for them."""
    m, graphs = Positional(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if in_place:
        m.compile(backend=backend)
        compiled = m
    else:
        compiled = torch.compile(m, backend=backend)
    compiled(torch.ones(2, 4))
    found = evaluated(
        lambda **o: CKASubscriber(torch.randn(9, 4), every=1, **o), *(compiled, unchanged, unchanged), on_error="log"
    )
    assert found["cka_to_init", "fc"] == [pytest.approx(1.0)] * 2
    assert len(graphs) == 1
