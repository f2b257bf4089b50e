"""No exception of code that ikkuna calls, of whatever kind and at whatever place, reaches training."""

import builtins
import enum
import logging
import signal
import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

from ikkuna.backends.backend import Backend
from ikkuna.backends.run import Run
from ikkuna.diagnosis import Rule
from ikkuna.export import Exporter
from ikkuna.export.handle import FunctionMetric
from ikkuna.export.subscriber import CallbackSubscriber, LossSubscriber, NormSubscriber, Subscriber
from ikkuna.metrics.live_rules import register_rules
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.store import run_directory
from ikkuna.store.names import Series
from ikkuna.store.run_directory import Continued, RunSettings
from ikkuna.support.console import announce
from ikkuna.support.failures import log

ARGUMENTS = {
    UnicodeDecodeError: ("utf-8", b"\xff", 0, 1, "x"),
    UnicodeEncodeError: ("ascii", "ä", 0, 1, "x"),
    UnicodeTranslateError: ("ä", 0, 1, "x"),
    BaseExceptionGroup: ("several", [KeyError(1)]),
    ExceptionGroup: ("several", [KeyError(1)]),
}
BUILTIN = [
    kind
    for name, kind in sorted(vars(builtins).items())
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name
    if kind not in (KeyboardInterrupt, SystemExit)
]


def built_in(kind):
    def fail():
        raise kind(*ARGUMENTS.get(kind, ("failed",)))

    return fail


class Mode(enum.Enum):
    FAST = 1


class Silent(Exception):
    """Has neither a text nor a cause that can be read."""

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__
    __cause__ = __traceback__ = property(lambda self: 1 / 0)


class Disguised(Exception):
    __class__ = KeyboardInterrupt


class Fatal(BaseException):
    pass


def fail_with(first, frame):
    raise ValueError("an error of a function that knows its caller")


def fail_as_cause():
    try:
        Mode(3)
    except ValueError as error:
        raise RuntimeError("bad mode") from error


def fail_in_circle():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def fail_in_finally():
    try:
        raise KeyError("first")
    finally:
        signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, sys._getframe())


def recurse():
    recurse()


def fail_in_thread():
    caught = []

    def run():
        try:
            fail_with(signal.SIGUSR1, sys._getframe())
        except ValueError as error:
            caught.append(error)

    (thread := threading.Thread(target=run)).start()
    thread.join()
    raise caught[0]


KINDS = {
    "OutOfMemoryError": built_in(
        torch.OutOfMemoryError
    ),  # the last one that `Kinds` raises, because it disables a subscriber
    **{kind.__name__: built_in(kind) for kind in BUILTIN},
    "Fatal": built_in(Fatal),
    "Silent": built_in(Silent),
    "Disguised": built_in(Disguised),
    "enumeration": lambda: Mode(3),
    "caller": lambda: fail_with("line", sys._getframe()),
    "level and caller": lambda: fail_with(logging.ERROR, sys._getframe()),
    "installed handler": lambda: signal.getsignal(signal.SIGUSR1)(None, None),
    "installed handler with a frame": fail_in_finally,
    "cause": fail_as_cause,
    "circle": fail_in_circle,
    "recursion": recurse,
    "thread": fail_in_thread,
}


@pytest.fixture(autouse=True)
def handled():
    """Install a handler whose function metrics call as well."""
    before = signal.signal(signal.SIGUSR1, fail_with)
    yield
    signal.signal(signal.SIGUSR1, before)


class Own(Subscriber):
    """Calls a function in one of its methods."""

    def __init__(self, method, function):
        super().__init__("weights", publishes="own", backend="null")
        self.method, self.function = method, function

    def measure(self, message):
        return self.function() if self.method == "measure" else torch.ones(1)

    def compute(self, message):
        self.function()


def of_callback(kind):
    return lambda function: CallbackSubscriber(kind, lambda message: function(), backend="null")


SUBSCRIBERS = {
    "measure": lambda function: Own("measure", function),
    "compute": lambda function: Own("compute", function),
    "metric": lambda function: FunctionMetric("weights", lambda tensor: function(), "own", backend="null"),
    "backend": lambda function: LossSubscriber(backend=lambda tag, value, step: function()),
    **{f"callback of {kind}": of_callback(kind) for kind in ("activations", "weights_norm2", "loss", "batch_finished")},
}


def training(bus):
    """Yield after each step."""
    model, loss = nn.Linear(2, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=bus, verbosity=0, on_error="log") as exporter:
        exporter.add_modules(model)
        exporter.set_loss(loss)
        while True:
            yield
            optimizer.zero_grad()
            loss(model(torch.ones(3, 2)), torch.zeros(3, 1)).backward()
            optimizer.step()


class Kinds:
    """Calls each function of `KINDS`, one at a call; every second call succeeds, so that no count of failures in a row grows."""

    def __init__(self):
        self.left, self.succeeds = list(KINDS.values()), True

    def __call__(self):
        self.succeeds = not self.succeeds
        if self.left and not self.succeeds:
            self.left.pop()()


@pytest.mark.fault(303)
@pytest.mark.parametrize("make", SUBSCRIBERS.values(), ids=SUBSCRIBERS)
def test_no_exception_of_a_subscriber_reaches_training(make, bus, caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds, steps = Kinds(), training(bus)
    next(steps)
    bus.register_subscriber(NormSubscriber("weights", backend="null"))
    bus.register_subscriber(make(kinds))
    for _ in range(3 * len(KINDS)):
        next(steps)
        if bus.run is not None:
            bus.run.flush(5.0)
    assert kinds.left == []
    steps.close()


@pytest.mark.fault(303)
@pytest.mark.parametrize("add", ["addFilter", "addHandler"])
def test_no_exception_of_a_log_reaches_training(add, bus, monkeypatch):
    kinds, handler = Kinds(), logging.Handler()
    handler.emit = handler.filter = lambda record: kinds()
    logger = logging.Logger("own")
    getattr(logger, add)(handler)
    monkeypatch.setattr(log, "logger", logger)
    for _ in range(2 * len(KINDS)):
        log.error("an error")
        announce("a line")
    assert kinds.left == []


MEMBERS = ("open", "describe", "add_scalar", "resume", "add_config", "commit", "flush", "draw", "close", "viewer")
PROPERTIES = ("acked_step", "dropped", "is_unwritable", "drawing_seconds")


@pytest.mark.fault(303)
@pytest.mark.parametrize("name", [*MEMBERS, *PROPERTIES])
def test_no_exception_of_a_backend_reaches_training(name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_directory, "environment", dict)
    settings = RunSettings(config={"lr": 0.1}, verbosity=1)
    for number, fail in enumerate(KINDS.values()):
        called = []

        def member(*arguments, fail=fail, called=called):
            called.append(arguments)
            fail()

        body = property(member) if name in PROPERTIES else member
        members = {"add_scalar": lambda *_: None, "open": lambda *_: None, name: body}
        backend = type("Own", (Backend,), members)()
        run = Run(tmp_path, settings=settings, continued=Continued(tmp_path / str(number), 0))
        for step in range(2):
            run.show(Series("loss"), 0.5, step, [backend])
            run.commit(step)
        assert (run.drawing_seconds, run.acked_step <= 1, run.dropped >= 0) == (0.0, True, True)
        assert isinstance(run.unwritable, tuple)
        run.flush(1.0)
        run.close(1.0)
        assert called


@pytest.mark.fault(303)
def test_no_exception_of_a_rule_reaches_training(bus, caplog):
    kinds = Kinds()

    class Failing(Rule):
        name, needs, meaning, advice = "own", {"loss": "LossSubscriber"}, "It fails.", "nothing"
        stride = 1

        def scores(self, history):
            kinds()
            return ()

    steps = training(bus)
    next(steps)
    register_rules(bus, [Failing()], every=1, loss_every=1)
    for _ in range(2 * len(KINDS) + 2):
        next(steps)
    steps.close()
    assert kinds.left == []


@pytest.mark.fault(341)
@pytest.mark.parametrize(("length", "count"), [(1, 4), (2, 9), (3, 14)])
def test_a_circle_of_messages_ends_with_the_subscriber_that_closes_it(length, count, bus, caplog):
    """Each subscriber publishes the kind that the next one takes; the last one publishes a message of the first kind again."""
    kinds, steps, taken, others = ["weights", "logged", "epoch_finished"][:length], training(bus), [], []
    next(steps)

    def publish(message, to):
        taken.append(message.kind)
        bus.publish(message if to == "weights" else NetworkMessage(message.stamp, to, 1.0))

    for kind, to in zip(kinds, [*kinds[1:], kinds[0]], strict=True):
        bus.register_subscriber(CallbackSubscriber(kind, partial(publish, to=to), backend="null"))
    bus.register_subscriber(CallbackSubscriber("batch_finished", others.append, backend="null"))
    for _ in range(5):
        next(steps)
    assert len(others) == 5
    assert (bus.error_guard.errors, len(bus.error_guard.disabled)) == (1, 1)
    assert "a circle of messages of the kind" in caplog.text
    assert len(taken) == count  # it goes round once more than there are subscribers, as no chain without a circle does
    steps.close()
