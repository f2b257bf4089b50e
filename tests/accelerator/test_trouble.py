"""Failures on a device do not reach training."""

import logging

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import NormSubscriber, SparsitySubscriber, VarianceSubscriber
from ikkuna.numerics.statistics.device import triton_launcher
from ikkuna.observation.hooks import hook
from ikkuna.testing import RecordingBackend
from tests.simulated_device import Stream, memory, recorded

pytestmark = pytest.mark.simulated


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).pow(2).sum().backward()
    optimizer.step()


class Watched:
    """A model under an exporter that records norms."""

    def __init__(self, bus, *kinds, make=NormSubscriber, modules=(4, 8)):
        self.model = nn.Sequential(nn.Linear(modules[0], modules[1]), nn.ReLU(), nn.Linear(modules[1], 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.recording = RecordingBackend()
        self.exporter = Exporter(message_bus=bus)
        self.exporter.add_modules(self.model)
        for kind in kinds:
            bus.register_subscriber(make(kind, backend=self.recording))

    def values(self):
        return {(series.kind, series.name, step): value for series, value, step in self.recording.values}


@pytest.mark.parametrize("make", [NormSubscriber, VarianceSubscriber, SparsitySubscriber])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20, float("nan")])
@pytest.mark.parametrize("has_float64", [True, False])
def test_magnitudes_beyond_float32_are_right_from_the_second_step_on(bus, request, make, scale, has_float64):
    if not has_float64:
        request.getfixturevalue("without_float64")

    class Scaled(nn.Module):
        def forward(self, x):
            return x * scale

    model, x = nn.Sequential(Scaled(), nn.Linear(3, 3)), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recording = RecordingBackend()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(make("activations", modules="0", backend=recording))
        for _ in range(5):
            step(model, optimizer, x)
    exact = (x * scale).cpu().double()
    expected = {
        NormSubscriber: exact.norm(),
        VarianceSubscriber: exact.var(correction=0),
        SparsitySubscriber: (exact == 0).double().mean(),
    }[make]
    last = recording.values[-1][1]
    assert last == pytest.approx(expected.item(), rel=1e-6, nan_ok=True)


def test_without_memory_for_the_copies_of_weights_training_goes_on(bus, monkeypatch):
    watched = Watched(bus, "weight_updates", "weights", modules=(100, 500))
    x = torch.randn(2, 100)
    step(watched.model, watched.optimizer, x)
    before = watched.model[0].weight.detach().clone()
    monkeypatch.setattr(memory, "limit", memory.used + 100_000)  # enough for the gradients, not for the copies
    step(watched.model, watched.optimizer, x)
    monkeypatch.undo()
    assert not torch.equal(before, watched.model[0].weight)
    step(watched.model, watched.optimizer, x)
    health = watched.exporter.health()
    watched.exporter.close()
    assert health.skipped > 0
    assert health.errors == 0
    assert ("weight_updates_norm2", "0", 2) in watched.values()


def test_a_part_of_the_model_on_another_stream(bus):
    """The copy to the host waits for both streams."""
    watched, side = Watched(bus, "activations"), Stream()
    first, relu, last = watched.model

    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x):
            side.wait_stream(torch.sim.current_stream())
            with torch.sim.stream(side):
                x = self.first(x)
            torch.sim.current_stream().wait_stream(side)
            return self.last(relu(x))

    model, x, expected = Streams(), torch.randn(6, 4), {}
    for i in range(3):
        expected[i] = first(x).norm().item()
        watched.optimizer.zero_grad()
        watched.model.forward = model.forward
        watched.model(x).sum().backward()
        watched.optimizer.step()
    watched.exporter.close()
    assert watched.exporter.health().errors == 0
    found = {step: value for (_, name, step), value in watched.values().items() if name == "0"}
    assert found == pytest.approx(expected, rel=1e-6)


def test_while_a_graph_is_captured_hooks_add_no_operator_and_ask_no_event(bus, monkeypatch, caplog):
    """Either would end the capture; the steps around it are recorded."""

    def logged(watched):
        with recorded() as log:
            step(watched.model, watched.optimizer, x)
        return list(log)

    x = torch.randn(2, 4)
    alone = Watched(MessageBus("alone"))
    alone.exporter.close()
    watched = Watched(bus, "weights", "activations", "layer_gradients", "weight_updates")
    for model in (alone, watched):
        step(model.model, model.optimizer, x)
    assert len(logged(watched)) > len(logged(alone))
    with monkeypatch.context() as captured:
        captured.setattr(hook, "in_capture", lambda: True)
        for _ in range(2):
            assert logged(watched) == logged(alone)
    step(watched.model, watched.optimizer, x)
    watched.exporter.close()
    health = watched.exporter.health()
    assert (health.errors, health.steps) == (0, 3)
    assert {step for _, name, step in watched.values() if name == "0"} == {0, 1, 2}
    assert len([record for record in caplog.records if "CUDA graph" in record.message]) == 1


@pytest.mark.usefixtures("kernels")
def test_a_kernel_that_fails_is_replaced_by_operators(bus, monkeypatch, caplog):
    kernels = triton_launcher.triton_kernels(torch.device("sim", 0))
    watched, x = Watched(bus, "weights", "activations"), torch.randn(2, 4)

    def failing(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_launcher, "launch", failing)
    norm = watched.model[0].weight.norm().item()
    with caplog.at_level(logging.WARNING, "ikkuna"):
        for _ in range(3):
            step(watched.model, watched.optimizer, x)
        watched.exporter.close()
    kernels.works = True
    assert watched.values()["weights_norm2", "0", 0] == pytest.approx(norm, rel=1e-6)
    assert [record.message for record in caplog.records if "no compiler" in record.message] == [
        "a Triton kernel failed, so torch's operators measure the tensors of sim:0: no compiler"
    ]
