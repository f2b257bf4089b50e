"""Results that arrive after their step: flags, learning rates, and rows that are computed beside training."""

import gc
import threading

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    DeferredRow,
    LearningRateSubscriber,
    NormSubscriber,
    PlotSubscriber,
    RankSubscriber,
    TestAccuracySubscriber,
)
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.support import device_thread
from ikkuna.support.device_thread import run_beside
from ikkuna.testing import RecordingBackend
from tests.simulated_device import Stream, memory, recorded

pytestmark = pytest.mark.simulated


def sim():
    """Return the simulated device, whose name torch knows only if tests run on it."""
    return torch.device("sim", 0)


class Run:
    """A small model under an exporter; `step` returns where training has waited."""

    def __init__(self, bus, *subscribers, lr=0.01, fused=True, **options):
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=fused)
        self.exporter = Exporter(message_bus=bus, **{"on_error": "raise", **options})
        self.exporter.add_modules(self.model)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        self.scaler = None

    def step(self, factor=1.0):
        x = torch.randn(5, 4)
        with recorded() as log:
            self.optimizer.zero_grad()
            loss = self.model(x).square().sum() * factor
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return log.waits


def steps_of(recording, kind):
    return [step for series, _, step in recording.values if series.kind == kind and series.name == "0"]


def test_a_step_that_a_fused_optimizer_skips_is_found_without_waiting(bus):
    recording, skipped = RecordingBackend(), []
    run = Run(
        bus,
        NormSubscriber("weight_updates", backend=recording),
        CallbackSubscriber("batch_finished", lambda message: skipped.append(message.skipped), backend="null"),
    )
    run.scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    assert [run.step(factor) for factor in (1.0, 1.0, float("inf"), 1.0)] == [[]] * 4
    run.exporter.close()
    assert skipped == [False, False, True, False]
    assert steps_of(recording, "weight_updates_norm2") == [0, 1, 3]


def test_learning_rates_on_the_device_are_read_without_waiting(bus):
    recording, rate = RecordingBackend(), torch.tensor(0.5)
    run = Run(bus, LearningRateSubscriber(backend=recording), lr=rate)
    for _ in range(3):
        assert run.step() == []
        rate.mul_(0.5)
    run.exporter.close()
    assert [value for _, value, _ in recording.values] == [0.5, 0.25, 0.125]


def test_the_spectra_of_a_step_are_computed_in_one_call_for_each_shape_beside_training(bus):
    recording = RecordingBackend()
    run = Run(bus, RankSubscriber("weight_gradients", subsample=1, backend=recording))
    run.model = run.model.append(nn.Linear(3, 6)).append(nn.Linear(6, 3))  # (3, 6) and (6, 3) twice
    run.exporter.add_modules(run.model)
    with recorded() as log:
        assert run.step() == []
        run.exporter.close()
    factorised = [entry for entry in log if (entry.kind, entry.name) == ("launch", "_linalg_svd")]
    assert len(factorised) == 3
    assert len({series.name for series, _, _ in recording.values}) == 4


def test_an_evaluation_takes_place_before_the_next_step(bus):
    """Its value belongs to the weights of its step, although it arrives later."""
    recording = RecordingBackend()
    with torch.device("cpu"):
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
        accuracy = TestAccuracySubscriber(data, every=1, backend=recording)
    run, expected = Run(bus, accuracy, NormSubscriber("weights", backend="null"), lr=0.3), []
    inputs, labels = (x.to("sim") for x in data.tensors)
    for _ in range(5):
        with torch.device("cpu"):
            run.optimizer.zero_grad()
            nn.functional.cross_entropy(run.model(inputs), labels).backward()
            run.optimizer.step()
        with torch.no_grad():
            model = nn.Sequential(*run.model)
            expected.append((model(inputs).argmax(1) == labels).double().mean().item())
    run.exporter.close()
    found = [value for series, value, _ in recording.values if series.kind == "test_accuracy"]
    assert len(set(expected)) > 2
    assert found == pytest.approx(expected)


def test_results_are_computed_in_the_order_of_the_calls_after_the_work_of_their_stream():
    order, side = [], Stream()
    with torch.sim.stream(side):
        x = torch.full((3,), 2.0)
        pending = [run_beside([sim()], lambda i=i: (order.append(i), x.sum().item())[1]) for i in range(5)]
    assert [p.result() for p in pending] == [6.0] * 5
    assert order == list(range(5))


def test_an_error_in_the_thread_is_raised_where_the_result_is_read():
    with pytest.raises(ZeroDivisionError):
        run_beside([sim()], lambda: 1 / 0).result()
    assert run_beside([sim()], lambda: 3).result() == 3


def test_without_a_thread_the_result_is_computed_where_it_is_read(monkeypatch):
    monkeypatch.setattr("_thread.start_new_thread", lambda *args: (_ for _ in ()).throw(RuntimeError("no thread")))
    assert run_beside([torch.device("sim", 0)], threading.get_ident).result() == threading.get_ident()


class Deferring(PlotSubscriber):
    """Returns rows that cannot be computed."""

    merge = "last"

    def __init__(self, **options):
        super().__init__("weights", publishes="deferred", **options)

    def measure(self, message: ModuleMessage) -> DeferredRow:
        return DeferredRow(message.data, self.failing)

    @staticmethod
    def failing(stack):
        raise torch.OutOfMemoryError("sim out of memory")

    def compute(self, message: ModuleMessage) -> None:
        self.emit(message, message.data[0])


def test_a_lack_of_memory_in_the_thread_is_counted_and_costs_only_its_rows(bus, caplog):
    recording = RecordingBackend()
    run = Run(bus, Deferring(backend=recording), NormSubscriber("weights", backend=recording), on_error="log")
    run.step()
    run.step()
    run.exporter.close()
    assert run.exporter.health().errors == 2
    assert "out of memory" in caplog.text
    assert {series.kind for series, _, _ in recording.values} == {"weights_norm2"}


class Held(PlotSubscriber):
    """Returns rows that are computed when a test allows it."""

    merge = "last"

    def __init__(self, **options):
        super().__init__("weights", publishes="held", **options)
        self.allowed = threading.Event()

    def measure(self, message: ModuleMessage) -> DeferredRow:
        return DeferredRow(message.data, self.row)

    def row(self, stack):
        self.allowed.wait(timeout=60)
        return stack.flatten(1).sum(1, keepdim=True)

    def compute(self, message: ModuleMessage) -> None:
        self.emit(message, message.data[0])


@pytest.mark.parametrize("limit", ["steps", "bytes"])
def test_rows_that_take_longer_than_the_steps_between_them_are_dropped(bus, caplog, monkeypatch, limit):
    """Neither copies nor steps that wait for delivery grow with the steps; the newest rows are dropped."""
    if limit == "bytes":
        monkeypatch.setattr(device_thread, "MOST_BYTES", 150)  # more than the copies of one step, 42 floats
    kept = {"steps": 4, "bytes": 1}[limit]
    recording = RecordingBackend()
    held = Held(backend=recording)
    run = Run(bus, held)
    used = []
    gc.collect()  # what other tests have left would be freed in between
    for _ in range(12):
        assert run.step() == []
        used.append(memory.used)
    assert used[5:] == [used[5]] * 7
    held.allowed.set()
    run.exporter.close()
    assert steps_of(recording, "held") == list(range(kept))
    assert run.exporter.health().dropped == 2 * (12 - kept)
    (line,) = [record.message for record in caplog.records if "more slowly" in record.message]
    assert line.startswith("Held(weights): the device computes its values more slowly than they are sampled")


class Evaluating(PlotSubscriber):
    """Passes on what a function returns that runs when a test allows it."""

    def __init__(self, **options):
        super().__init__("batch_finished", publishes="evaluated", **options)
        self.allowed = threading.Event()

    def compute(self, message) -> None:
        self.later(
            message, [sim()], lambda: self.allowed.wait(timeout=60), lambda result: self.emit(message, 1.0 * result())
        )


def test_functions_that_run_beside_training_are_dropped_if_they_take_longer_than_the_steps_between_them(bus):
    """The results of those that were taken are delivered."""
    recording = RecordingBackend()
    evaluating = Evaluating(backend=recording)
    bus.register_subscriber(evaluating)
    for step in range(7):
        evaluating.compute(NetworkMessage(Stamp(step, step, 0), "batch_finished"))
    (registered,) = bus.registered
    assert registered.dropped == 3
    evaluating.allowed.set()
    for result in bus.late:
        result.deliver(bus)
    bus.close()
    assert [step for _, _, step in recording.values] == [0, 1, 2, 3]
