"""Models whose blocks are compiled one by one, and modules that a compiled graph calls more than once."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber
from ikkuna.testing import RecordingBackend
from tests.export.test_invisible import same

BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
KINDS = ("layer_inputs", "activations", "layer_gradients", "weight_updates")
BLOCKS = 12
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Twice(nn.Module):
    """Calls modules with the same input, and with outputs that receive the same gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.r, self.b = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)

    def forward(self, x, y):
        return self.b(self.r(self.a(x)) + self.r(self.a(y)) + self.r(self.a(x)))


def watch(model, subsample=1):
    recording = RecordingBackend()
    exporter = Exporter(message_bus=MessageBus(), on_error="raise")
    exporter.add_modules(model)
    for kind in KINDS:
        exporter.message_bus.register_subscriber(NormSubscriber(kind, subsample=subsample, backend=recording))
    return exporter, recording


def values(recording):
    return {(series.kind, series.name, step): value for series, value, step in recording.values}


def train_blocks(backend, watched, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(BLOCKS)), nn.Linear(8, 3))
    for block in model[1:-1] if backend is not None else ():
        block.compile(fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    exporter, recording = watch(model, subsample=2) if watched else (None, None)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if exporter is not None:
        exporter.close()
    result = {"losses": losses, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return result, recording and values(recording)


@pytest.mark.fault(201)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_compiled_blocks_share_a_graph(backend):
    """Without a monitor there is one graph; with one a second one for sampled steps.  The limit is 8 graphs."""
    plain, _ = train_blocks(backend, watched=False)
    graphs = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    counters.clear()
    seen, compiled = train_blocks(backend, watched=True)
    assert counters["stats"]["unique_graphs"] <= 2 * graphs
    same(plain, seen)
    _, eager = train_blocks(None, watched=True)
    assert compiled.keys() == eager.keys()
    assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-6)


@pytest.mark.fault(209)
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_with_equal_arguments_count_separately(backend):
    def run(compiling):
        torch.manual_seed(0)
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        exporter, recording = watch(model)
        if compiling:
            model.compile(backend=backend, fullgraph=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4), torch.arange(12.0).view(3, 4)).sum().backward()
            optimizer.step()
        exporter.close()
        return values(recording)

    eager, compiled = run(False), run(True)
    assert compiled.keys() == eager.keys()
    assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-6)
    gradient = eager["layer_gradients_norm2", "r", 0]
    torch.manual_seed(0)
    column = Twice().b.weight.sum(0)  # each of the three calls receives the same gradient in each of the 3 rows
    assert gradient == pytest.approx(3 * column.norm().item(), rel=1e-5)


def test_two_calls_of_a_model_in_one_graph_are_both_seen():
    """The caller is compiled, and the graph contains the root twice."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    exporter, recording = watch(model)
    both = torch.compile(lambda x: model(x) + model(x), backend="aot_eager", fullgraph=True)
    both(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    exporter.close()
    assert values(recording)["layer_inputs_norm2", "0", 0] == pytest.approx(24**0.5, rel=1e-5)
