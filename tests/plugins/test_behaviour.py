"""Training and the other subscribers continue, whatever the code of one subscriber does."""

import asyncio
import logging

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber, Subscriber
from ikkuna.testing import RecordingBackend, small_model

STEPS = 4


class Acting(Subscriber):
    """Calls `deed` in `measure` or in `compute`, and emits one number."""

    def __init__(self, where, deed):
        super().__init__("activations", publishes="acting", backend="null")
        self.where, self.deed, self.calls = where, deed, 0

    def act(self, where):
        if where == self.where:
            self.calls += 1
            self.deed()

    def measure(self, message):
        self.act("measure")
        return torch.ones(1)

    def compute(self, message):
        self.act("compute")
        self.emit(message, 1.0)


class Training:
    """The training of a model with an `Acting` subscriber and, after it, a norm."""

    def __init__(self, bus, on_error="disable"):
        self.bus, self.others = bus, RecordingBackend()
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.exporter = Exporter(message_bus=bus, on_error=on_error)
        self.exporter.add_modules(self.model)
        self.published = []

    def watch(self, where, deed):
        self.acting = Acting(where, deed)
        self.handle = self.bus.register_subscriber(self.acting)
        self.other = self.bus.register_subscriber(NormSubscriber("weights", backend=self.others))
        self.bus.register_subscriber(CallbackSubscriber("acting", self.published.append, backend="null"))

    def forward(self):
        return self.model(torch.ones(5, 4)).square().sum()

    def run(self):
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.forward().backward()
            self.optimizer.step()
        self.exporter.close()

    def steps_of_others(self):
        return sorted({step for _, _, step in self.others.values})


@pytest.fixture
def training(bus):
    made = Training(bus)
    yield made
    made.exporter.close()


@pytest.fixture(params=["measure", "compute"])
def where(request):
    return request.param


def unwatched():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(5, 4)).square().sum().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters())


def trained(training):
    return nn.utils.parameters_to_vector(training.model.parameters())


@pytest.mark.fault(39)
@pytest.mark.parametrize("gradient", [True, False])
def test_a_model_that_a_subscriber_calls_is_not_recorded(training, where, gradient):
    """Otherwise the subscriber would observe its own calls, without end."""

    def call():
        with torch.set_grad_enabled(gradient):
            training.forward()

    training.watch(where, call)
    training.run()
    assert training.acting.calls == 3 * STEPS
    assert training.exporter.health().errors == 0
    assert training.exporter.health().steps == STEPS
    assert training.steps_of_others() == list(range(STEPS))
    assert torch.equal(trained(training), unwatched())


def test_an_evaluation_that_a_subscriber_starts_is_recorded(training):
    class Evaluating(Acting):
        needs_model = True

    seen = []
    evaluating = Evaluating("compute", lambda: evaluating.evaluate([torch.ones(5, 4)]))
    training.bus.register_subscriber(evaluating)
    training.bus.register_subscriber(CallbackSubscriber("activations", seen.append, tag="testing", backend="null"))
    training.run()
    assert {message.tag for message in seen} == {"testing"}
    assert {message.module for message in seen} == {"first", "relu", "last"}
    assert torch.equal(trained(training), unwatched())


def test_recording_continues_after_a_subscriber_has_failed(training, where):
    """Recording is suspended only during the call, also if the call raises."""

    def fail():
        raise ValueError("always")

    training.watch(where, fail)
    training.run()
    assert training.steps_of_others() == list(range(STEPS))
    assert training.exporter.health().disabled == ("Acting",)
    assert training.acting.calls == 10
    assert torch.equal(trained(training), unwatched())


@pytest.mark.fault(30)
def test_occasional_failures_disable_no_subscriber(training, where):
    calls = iter(range(1000))

    def fail_often():
        if next(calls) % 10 != 9:
            raise ValueError("often")

    training.watch(where, fail_often)
    for _ in range(5):
        training.optimizer.zero_grad()
        training.forward().backward()
        training.optimizer.step()
    assert training.acting.calls == 15
    assert training.exporter.health().disabled == ()
    assert training.exporter.health().errors == 14


@pytest.mark.fault(35)
def test_a_subscriber_that_unregisters_during_a_step_emits_nothing_more(training, where):
    training.watch(where, lambda: training.handle.remove())
    training.run()
    assert training.acting.calls <= 3
    assert training.published == []
    assert training.steps_of_others() == list(range(STEPS))


def test_a_subscriber_that_another_one_unregisters_emits_nothing_more(training, where):
    training.watch(where, lambda: training.other.remove())
    training.run()
    assert training.others.values == []
    assert len(training.published) == 3 * STEPS


def test_a_subscriber_registered_during_a_step_begins_with_the_next(training, where):
    late = RecordingBackend()
    made = []

    def register():
        if not made:
            made.append(training.bus.register_subscriber(NormSubscriber("biases", backend=late)))

    training.watch(where, register)
    training.run()
    assert sorted({step for _, _, step in late.values}) == list(range(1, STEPS))
    assert training.exporter.health().errors == 0


@pytest.mark.fault(35)
def test_a_subscriber_may_close_the_exporter(training, where):
    training.watch(where, lambda: training.exporter.close())
    training.run()
    assert training.acting.calls <= 3
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in training.model.modules())
    assert torch.equal(trained(training), unwatched())


@pytest.mark.fault(45)
def test_the_return_value_of_a_subscriber_changes_nothing(training):
    training.watch("measure", lambda: None)
    returned = CallbackSubscriber("activations", lambda message: torch.zeros(7), backend="null")
    training.bus.register_subscriber(returned)
    training.run()
    assert torch.equal(trained(training), unwatched())


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.fault(43)
def test_an_error_that_cannot_be_printed_is_logged(training, where, caplog):
    def fail():
        raise Unprintable

    training.watch(where, fail)
    training.run()
    assert training.exporter.health().disabled == ("Acting",)
    assert "disabled after 10 consecutive failures; last: " in caplog.text
    assert torch.equal(trained(training), unwatched())


@pytest.mark.fault(44)
def test_a_log_handler_that_raises_does_not_affect_training(training, where):
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("the log is full")

    def fail():
        raise ValueError("always")

    training.watch(where, fail)
    logger, broken = logging.getLogger("ikkuna"), Broken()
    logger.addHandler(broken)
    try:
        training.run()
    finally:
        logger.removeHandler(broken)
    assert training.exporter.health().disabled == ("Acting",)
    assert torch.equal(trained(training), unwatched())


@pytest.mark.fault(29)
def test_rows_that_cannot_be_merged_are_failures_of_their_subscriber(training, caplog):
    class Growing(Acting):
        def measure(self, message):
            self.calls += 1
            return torch.ones(self.calls + 1)

    training.bus.register_subscriber(Growing("measure", None))
    for _ in range(STEPS):
        for _ in range(2):  # micro-batches
            training.forward().backward()
        training.optimizer.step()
    assert training.exporter.health().errors == 10
    assert "subscriber Growing(activations) failed in merge" in caplog.text
    assert training.exporter.health().disabled == ("Growing",)
    assert "disabled after 10 consecutive failures; last: RuntimeError" in caplog.text


@pytest.mark.fault(31)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_the_process_are_not_caught(training, where, error):
    def leave():
        raise error

    training.watch(where, leave)
    with pytest.raises(error):
        training.run()


class OwnBaseException(BaseException):
    """An exception that is no ``Exception``."""


@pytest.mark.fault(31, 303)
@pytest.mark.parametrize(
    "error",
    [
        *(MemoryError, RecursionError, StopIteration, AssertionError),
        *(GeneratorExit, asyncio.CancelledError, OwnBaseException),
    ],
)
def test_other_errors_do_not_reach_training(training, where, error):
    def fail():
        raise error

    training.watch(where, fail)
    training.run()
    assert training.exporter.health().disabled == ("Acting",)
    assert torch.equal(trained(training), unwatched())
