"""Metrics of the run itself, against a clock of our own."""

import math
import resource
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, SpeedSubscriber
from ikkuna.observation.hooks.hook import Stopwatch
from ikkuna.testing import RecordingBackend
from tests.metrics.running import curves


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is told to go on."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def timed(clock, steps, micro_batches=1, ours=0.0, **options):
    """Train: 1 s for data, 2 s a micro-batch, and `ours` for a slow subscriber; return kind → values."""
    recording, model = RecordingBackend(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def dawdle(message):
        clock.seconds += ours

    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(CallbackSubscriber("weights", dawdle, backend="null"))
        exporter.message_bus.register_subscriber(SpeedSubscriber(backend=recording, **options))
        for _ in range(steps):
            clock.seconds += 1
            for _ in range(micro_batches):
                model(torch.ones(8, 3)).sum().backward()
                clock.seconds += 2
            optimizer.step()
            optimizer.zero_grad()
    return {kind: values for (kind, _), values in curves(recording).items()}


def test_a_step_lasts_from_the_end_of_the_one_before(clock):
    found = timed(clock, 4)
    assert found["step_seconds"] == [3.0] * 3
    assert found["samples_per_second"] == [8 / 3] * 3
    assert found["monitor_share"] == [0.0] * 3
    assert len(found["peak_memory"]) == 4


def test_all_micro_batches_count(clock):
    found = timed(clock, 2, micro_batches=3)
    assert found["step_seconds"] == [7.0]
    assert found["samples_per_second"] == [24 / 7]


def test_our_share_is_the_time_spent_in_subscribers(clock):
    found = timed(clock, 3, ours=1.0)
    assert found["step_seconds"] == [4.0] * 2
    assert found["monitor_share"] == [0.25] * 2


def test_a_sampled_step_is_timed_alone(clock):
    found = timed(clock, 5, subsample=2)
    assert found["step_seconds"] == [3.0] * 2


def test_peak_memory_is_that_of_the_process(clock):
    found = timed(clock, 1)["peak_memory"]
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert found == [pytest.approx(now, rel=0.05)]


def test_peak_memory_is_not_that_of_the_process_that_started_it():
    ballast = b"\1" * (1 << 30)
    asked = "from ikkuna_subscribers.training import resident_peak; print(resident_peak())"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert 1 << 26 < float(answer) < len(ballast)


def test_a_step_that_a_scaler_skips_has_no_values():
    recording, model = RecordingBackend(), nn.Linear(3, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(SpeedSubscriber(backend=recording))
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(8, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [step for series, _, step in recording.values if series.kind == "peak_memory"] == [0, 1]


def test_devices_have_series_of_their_own(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda i: 1000 * (i + 1))
    recording, model = RecordingBackend(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(SpeedSubscriber(backend=recording))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    found = curves(recording)
    assert (found["peak_memory", "cuda:0"], found["peak_memory", "cuda:1"]) == ([1000.0], [2000.0])


def test_inputs_without_an_axis_have_no_samples(clock):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            clock.seconds += 1
            return self.layer(x.reshape(1, 1)).sum()

    recording, model = RecordingBackend(), Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=MessageBus(), on_error="raise") as exporter:
        exporter.add_modules(model)
        exporter.message_bus.register_subscriber(SpeedSubscriber(backend=recording))
        for _ in range(2):
            model(torch.tensor(1.0)).backward()
            optimizer.step()
    kinds = {kind for kind, _ in curves(recording)}
    assert kinds == {"step_seconds", "monitor_share", "peak_memory"}


def test_a_lap_counts_what_is_not_over_yet(clock):
    watch = Stopwatch()
    assert watch.lap() is None
    watch.start()
    clock.seconds += 2
    assert watch.lap() == (2.0, 2.0)
    clock.seconds += 1
    watch.stop()
    clock.seconds += 3
    assert watch.lap() == (4.0, 1.0)
    assert math.isclose(watch.spent, 3.0)
