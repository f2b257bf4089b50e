"""P8: the exporter says how it is doing, what it costs, and what was lost."""

import time

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.errors import ConfigTypeError, PluginError
from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.observation.hooks.hook import Stopwatch
from ikkuna.testing import RecordingBackend
from tests.zoo import CASES, Loop


class Clock:
    """A clock that only the test advances."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def advance(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


def test_overhead_is_our_time_beside_the_rest(bus, clock):
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(loop.model)
        slow = CallbackSubscriber("activations", lambda message: clock.advance(0.01), modules="0", backend="null")
        bus.register_subscriber(slow)
        loop.loss.register_forward_hook(lambda *_: clock.advance(0.02))
        loop.run(12)
        health = exporter.health()
    # 10 ms of ours beside 20 ms; native functions have a clock of their own, and take microseconds
    assert health.overhead == pytest.approx(0.5, abs=0.005)
    assert health.seconds["CallbackSubscriber(activations)"] == pytest.approx(0.12)


def test_the_time_of_the_first_step_is_not_counted(monkeypatch):
    """The end of a step is marked between `start` and `stop`, whose time belongs to both steps."""
    now = iter(
        [0.0, 5.0, 5.5, 6.0, 7.0, 7.0]
    )  # start, end of the first step, stop, start, end of the second step, stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    watch = Stopwatch()
    for _ in range(2):
        watch.start()
        watch.step_ended()
        watch.stop()
    assert watch.overhead() == pytest.approx(1.5 / 0.5)


def test_what_is_started_inside_is_counted_once(clock):
    watch = Stopwatch()
    watch.start()
    watch.start()
    clock.advance(0.01)
    watch.stop()
    watch.stop()
    assert watch.spent == pytest.approx(0.01)


def test_a_stopwatch_knows_what_others_have_spent(clock):
    """Each step has 1 s inside, 1 s of others, and 3 s of its own; each but the first 0.5 s of other threads beside it."""
    others = [0.0]
    watch = Stopwatch(lambda: others[0])
    assert watch.lap() is None
    assert (watch.overhead(), watch.spent_later) == (0.0, 0.0)
    for step in range(4):
        watch.start()
        clock.advance(1.0)
        watch.stop()
        others[0] += 1.0
        clock.advance(4.0)
        watch.step_ended()
        assert watch.overhead(0.5 * step) == pytest.approx(2.5 / 2.5 if step else 0.0)
        assert watch.spent_later == pytest.approx(2.0 * step)
        assert watch.lap() == pytest.approx((5.0, 2.0))
    watch.steps_passed(ended=40.0, later=0.0)
    assert watch.overhead(1.5) == pytest.approx(7.5 / 27.5)  # 20 s later, in which nothing was spent
    clock.advance(25.0)
    assert watch.lap() == pytest.approx((5.0, 0.0))


def test_a_stopwatch_that_an_exception_left_open_starts_anew(clock):
    watch = Stopwatch()
    watch.start()
    clock.advance(1.0)
    watch.restart()
    clock.advance(2.0)
    watch.stop()
    assert watch.spent == pytest.approx(2.0)


def test_the_last_step_written_is_acknowledged(bus, tmp_path):
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=bus, log_dir=tmp_path) as exporter:
        exporter.add_modules(loop.model)
        assert exporter.health().acked_step == -1
        bus.register_subscriber(NormSubscriber("weights"))
        loop.run(3)
        bus.run.flush(10)
        assert exporter.health().acked_step == 2


def test_the_one_line_for_the_hurried(tmp_path):
    loop = Loop(CASES["conv-bn-dropout"])
    with ikkuna.watch(loop.model, loss=loop.loss, log_dir=tmp_path) as exporter:
        loop.run(2)
        kinds = exporter.message_bus.kinds
        assert {"train_accuracy", "weights_norm2", "weight_updates_weights_ratio"} <= set(kinds)
        assert exporter.health().errors == 0
    assert list(tmp_path.glob("*/events.out.tfevents.*"))


def test_watch_takes_subscribers_of_ones_own():
    with ikkuna.watch(nn.Linear(2, 2), NormSubscriber("weights", backend="null"), rules=None) as exporter:
        assert type(exporter.message_bus.registered[0].subscriber).__name__ == "NormSubscriber"


def test_watch_leaves_nothing_behind_when_it_fails():
    model = nn.Linear(2, 2)
    with pytest.raises(PluginError, match="unknown preset 'fast'; available: 'default'"):
        ikkuna.watch(model, preset="fast")
    with pytest.raises(ConfigTypeError, match="needs subscribers, a loss or an optimizer"):
        ikkuna.watch(model, 3)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(torch.zeros(1, 2)), model.bias.detach()[None])


@pytest.mark.fault(221)
def test_health_after_close_is_that_at_the_end(tmp_path):
    loop = Loop(CASES["mlp"])
    with Exporter(message_bus=MessageBus(log_dir=tmp_path)) as exporter:
        exporter.add_modules(loop.model)
        exporter.message_bus.register_subscriber(NormSubscriber("weights"))
        loop.run(3)
    health = exporter.health()
    assert (health.acked_step, health.steps, health.dropped) == (2, 3, 0)
    assert list(health.seconds) == ["NormSubscriber(weights)"]
    assert health == exporter.health()


@pytest.mark.fault(312)
def test_after_a_checkpoint_of_an_earlier_step_is_loaded_only_its_steps_are_acknowledged(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(exporter, steps):
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert exporter.message_bus.run.flush()
        return exporter.health().acked_step

    with ikkuna.watch(model, NormSubscriber("weights", backend="jsonl"), log_dir=tmp_path) as exporter:
        assert train(exporter, 3) == 2
        state = exporter.state_dict()
        assert train(exporter, 5) == 7
        exporter.load_state_dict(state)
        assert exporter.health().acked_step == 2
        assert train(exporter, 2) == 4
    assert exporter.health().acked_step == 4


@pytest.mark.fault(319)
def test_a_sparse_parameter_is_observed(bus):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.weight, x)

    model, values = Sparse(), RecordingBackend()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        bus.register_subscriber(NormSubscriber("weights", backend=values))
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
    assert exporter.health().errors == 0
    assert next(value for _, value, _ in values.values) == pytest.approx(3**0.5)
