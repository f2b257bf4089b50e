"""A subscriber borrows its tensors: to keep one costs little, and its results are its own."""

import os
import threading
import time

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    HistogramSubscriber,
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    Subscriber,
)
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.numerics.statistics.native import library
from ikkuna.numerics.statistics.native.hook_functions import hook_functions
from ikkuna.observation.hooks import parameter_table
from ikkuna.testing import RecordingBackend

pytestmark = pytest.mark.devices


def train(bus, model, *subscribers, steps=2, log_dir=None):
    """Train a model under an exporter; return its health at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Exporter(message_bus=bus, on_error="raise", log_dir=log_dir) as exporter:
        exporter.add_modules(model)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).square().sum().backward()
            optimizer.step()
        return exporter.health()


@pytest.mark.fault(41)
def test_a_message_that_is_kept_keeps_no_graph_alive(bus):
    kept = []
    train(bus, nn.Sequential(nn.Linear(3, 4), nn.ReLU()), CallbackSubscriber(MODULE_KINDS, kept.append, backend="null"))
    assert {message.kind for message in kept} == set(MODULE_KINDS)
    assert not [message.kind for message in kept if message.data.requires_grad or message.data.grad_fn is not None]


class First(Subscriber):
    """The first element, as a view of the tensor it was handed."""

    def __init__(self, kind, **options):
        super().__init__(kind, publishes=f"{kind}_first", **options)

    def measure(self, message):
        return message.data.reshape(-1)[:1]

    def compute(self, message):
        self.emit(message, message.data[0])


@pytest.mark.fault(42)
def test_a_row_does_not_change_with_the_tensor_it_was_made_of(bus):
    """An in-place activation, the optimizer and ``zero_grad`` overwrite what a tap has seen."""
    model = nn.Sequential(
        nn.Linear(3, 1), nn.ReLU(inplace=True)
    ).double()  # a row is float64 already: nothing converts it
    nn.init.constant_(model[0].weight, -1.0)
    nn.init.zeros_(model[0].bias)
    recording = RecordingBackend()
    kinds = ("activations", "weights")
    train(bus, model, *(First(kind, modules="0", backend=recording) for kind in kinds), steps=1)
    assert {series.kind: value for series, value, _ in recording.values} == {
        "activations_first": -3.0,
        "weights_first": -1.0,
    }


class Reading(Subscriber):
    """Reads tensors itself, and may change one of them."""

    def __init__(self, kind, changes=None, **options):
        super().__init__(kind, publishes=f"{kind}_read", **options)
        self.changes, self.row = changes, torch.zeros(1, dtype=torch.float64)

    def measure(self, message):
        if message.series_name == self.changes:
            message.data.add_(1)
        self.row.fill_(message.data.double().sum().item())
        return self.row  # of which a copy is kept

    def compute(self, message):
        self.emit(message, message.data[0])


@pytest.mark.parametrize("others", [(NormSubscriber,), (NormSubscriber, HistogramSubscriber), ()])
def test_parameters_are_measured_by_subscribers_and_by_kernels_in_one_step(bus, others):
    """Whether the kernels measure them as well, only read them, or leave them to Python."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    before = {
        f"{i}{name}": p.double().sum().item()
        for i in (0, 1)
        for name, p in (("", model[i].weight), (".b", model[i].bias))
    }
    recording, kinds = RecordingBackend(), ("weights", "biases", "weight_gradients", "bias_gradients_unclipped")
    shared = [cls(kind, backend=recording) for cls in others for kind in kinds]
    train(bus, model, *shared, *(Reading(kind, backend=recording) for kind in kinds), steps=1)
    found = {(s.kind, s.name): value for s, value, _ in recording.values if s.kind.endswith("_read")}
    assert len(found) == 8
    assert found["weights_read", "0"] == pytest.approx(before["0"], rel=1e-6)
    assert found["biases_read", "1"] == pytest.approx(before["1.b"], rel=1e-6)


@pytest.mark.parametrize("others", [(NormSubscriber,), ()])
def test_a_subscriber_that_changes_a_parameter_is_disabled(bus, others, caplog):
    model, recording = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), RecordingBackend()
    shared = [cls("weights", backend=recording) for cls in others]
    health = train(bus, model, *shared, Reading("weights", changes="0", backend="null"), steps=3)
    assert len(health.disabled) == 1
    assert "it changed 'weights' of 0 in place" in caplog.text
    assert len(recording.values) == 6 * len(others)


@pytest.mark.host("replaces the copy of a tensor of the host; tests/accelerator has the test of a device")
@pytest.mark.fault(60)
def test_an_update_there_is_no_memory_for_goes_unseen_and_is_counted(bus, monkeypatch):
    clone, model = torch.Tensor.clone, nn.Linear(3, 4)

    def out_of_memory(tensor, **options):
        if tensor.data_ptr() == model.weight.data_ptr():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clone(tensor, **options)

    def no_array(*arguments):
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "clone", out_of_memory)
    monkeypatch.setattr(parameter_table.np, "empty", no_array)
    recording = RecordingBackend()
    kinds = ("weight_updates", "bias_updates", "weights")
    health = train(bus, model, *(NormSubscriber(kind, backend=recording) for kind in kinds))
    assert health.skipped == 2
    assert {series.kind for series, _, _ in recording.values} == {"bias_updates_norm2", "weights_norm2"}


def descriptors():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@pytest.mark.fault(75, 76)
def test_any_number_of_modules_and_metrics_is_one_file_and_one_thread(bus, tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), *(nn.Linear(3, 3) for _ in range(60)))
    makers = (NormSubscriber, MeanSubscriber, MinMaxSubscriber)
    hook_functions(library(), wait=True)  # the first process on a machine compiles them, with files of its own
    before = descriptors(), threading.active_count()
    during = []

    def look(message):
        bus.run and bus.run.flush(30)  # the writer is idle then; while it creates the file it opens the directory too
        kept, until = descriptors(), time.monotonic() + 5
        while kept - before[0] > 2 and time.monotonic() < until:  # the directory is open while it is synchronised
            time.sleep(0.005)
            kept = min(kept, descriptors())
        during.append((kept - before[0], threading.active_count() - before[1]))

    shown = [make("weights", backend="jsonl") for make in makers]
    train(bus, model, *shown, CallbackSubscriber("batch_started", look), log_dir=tmp_path)
    assert max(during) <= (2, 1)  # the file of values, and the lock of the run
    stored = [path.suffix for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(stored) == ["", ".json", ".jsonl"]  # the lock of the run, its description, and its values
