"""Tensors whose storage was shrunk or freed after they were created, as sharded training does: nothing reads them."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import MeanSubscriber
from ikkuna.numerics.elements import has_numbers
from ikkuna.numerics.statistics import FIELDS, native, needed_fields
from ikkuna.numerics.statistics.host import measure
from ikkuna.testing import RecordingBackend
from tests.subscribers import EVERY_SUBSCRIBER

ALL = needed_fields(f for f in FIELDS if "codes" not in f)
CODES = needed_fields(("codes",))

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "with an offset": lambda x: x[7:],
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[100:, :1].expand(-1, 100),
    "one element": lambda x: x[-1, -1],
    "a parameter": nn.Parameter,
    "a subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})),
    "a wrapper": lambda x: TwoTensor(torch.ones(200, 100), x),
    "a lazy negative": lambda x: torch.view_as_complex(x.view(-1, 2)).conj().imag,
    "complex": lambda x: torch.view_as_complex(x.view(-1, 2)),
    "half": lambda x: x.view(torch.float16),
    "integers": lambda x: x.view(torch.int64),
    "sparse": lambda x: torch.sparse_coo_tensor(torch.arange(200)[None], x, (200, 100), is_coalesced=True),
    "rows": lambda x: torch.sparse_csr_tensor(torch.tensor([0, 200]), torch.arange(200), x[:, 0], (1, 200)),
}


@pytest.mark.fault(306)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kernels", ["native", "eager"])
@pytest.mark.parametrize("left", [0, 64, 400])
@pytest.mark.parametrize("view", VIEWS)
def test_a_tensor_beyond_its_storage_has_no_numbers(view, left, kernels):
    x = torch.ones(200, 100)
    y = VIEWS[view](x).detach()
    assert has_numbers(y)
    x.untyped_storage().resize_(left)
    assert not has_numbers(y)
    assert measure(y, ALL, native=kernels == "native") is None
    assert measure(y, CODES, native=kernels == "native") is None


def test_kernels_refuse_what_lies_beyond_the_storage_and_accept_what_does_not():
    kernels = native.library()
    x = torch.ones(200, 100)
    begin, end, across = x[:100], x[100:], x[99:101]
    assert kernels.accepts(begin)
    assert kernels.accepts_difference(begin, end)
    x.untyped_storage().resize_(100 * 100 * 4)
    assert kernels.accepts(begin)
    for refused in (x, end, across):
        assert not kernels.accepts(refused)
    assert not kernels.accepts_difference(begin, end)
    assert measure(begin, ALL).l1 == 10_000


CALL_THE_MODEL = {
    *("LayerSaturationSubscriber", "SVCCASubscriber", "CKASubscriber", "HessianSubscriber", "AttentionSubscriber"),
    *("FreezeSubscriber", "TestAccuracySubscriber"),
}
"""These call the user's model, which reads its weights itself, or need the result of such a call."""


class Nothing(torch.optim.Optimizer):
    """Leaves the parameters as they are, and reads none of them."""

    def __init__(self, parameters, at_step=lambda: None):
        super().__init__(parameters, {"lr": 0.1})
        self.at_step = at_step

    def step(self, closure=None):
        self.at_step()


class Frees(nn.Module):
    """Returns its input, and a tensor without storage."""

    def forward(self, x):
        buffer = torch.ones(300, 300)
        part = buffer[5:]
        buffer.untyped_storage().resize_(0)
        return x, part


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.frees = nn.Linear(300, 300), Frees()

    def forward(self, x):
        return self.frees(self.fc(x))[0]


def free(tensor):
    tensor.untyped_storage().resize_(0)


def free_weights(model):
    free(model.fc.weight)


def free_gradients(model):
    free(model.fc.weight.grad)


CASES = {
    # what is freed before and within the step, the kinds that are observed, and the number of tensors that cannot be read
    "activations": (None, None, ["activations"], 1),
    "weights before the step": (free_weights, None, ["weights", "weight_updates"], 2),
    "weights within the step": (None, free_weights, ["weight_updates"], 1),
    "gradients before the step": (free_gradients, None, ["weight_gradients"], 1),
}


@pytest.mark.fault(306)
@pytest.mark.parametrize("kernels", ["native", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_what_a_step_cannot_read_is_counted_as_skipped(case, kernels):
    before, within, kinds, skipped = CASES[case]
    model, recording = Model(), RecordingBackend()
    optimizer = Nothing(model.parameters(), lambda: within and within(model))
    with Exporter(message_bus=MessageBus(), kernels=kernels, on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in (*kinds, "bias_gradients"):
            exporter.message_bus.register_subscriber(MeanSubscriber(kind, backend=recording))
        model(torch.ones(2, 300)).sum().backward()
        if before:
            before(model)
        optimizer.step()
    assert exporter.health().skipped == skipped
    shown = [(series.kind, series.name) for series, *_ in recording.values]
    read = [("activations_mean", "fc"), ("activations_mean", "frees")] if case == "activations" else []
    assert sorted(shown) == [*read, ("bias_gradients_mean", "fc")]


@pytest.mark.fault(306)
def test_no_metric_reads_a_freed_tensor():
    model, loss = Model(), nn.MSELoss()
    optimizer = Nothing(model.parameters(), lambda: free_weights(model))
    with Exporter(message_bus=MessageBus()) as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        for name, make in EVERY_SUBSCRIBER.items():
            if name not in CALL_THE_MODEL:
                exporter.message_bus.register_subscriber(make(backend=RecordingBackend()))
        loss(model(torch.ones(2, 300)), torch.zeros(2, 300)).backward()
        free_gradients(model)
        optimizer.step()
    assert exporter.health().skipped > 0
