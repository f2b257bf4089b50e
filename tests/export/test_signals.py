"""Exceptions of the user's signal handlers reach the user, whatever code of ikkuna or of a subscriber they interrupt."""

import functools
import logging
import os
import random
import signal
import sys
import time

import pytest
import torch
from torch import nn

from ikkuna.backends.backend import Backend
from ikkuna.export import Exporter
from ikkuna.export.subscriber import CallbackSubscriber, NormSubscriber
from ikkuna.testing import RecordingBackend


class Interrupted(Exception):
    """Exceptions that the user's handlers raise."""


def plain(signum, frame):
    raise Interrupted


def deleting(signum, frame):
    del signum, frame
    raise Interrupted


def uninstalling(signum, frame):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise Interrupted


def taking_anything(*arguments):
    raise Interrupted


def calling(signum, frame):
    plain(signum, None)


def with_more(more, signum, frame):
    raise Interrupted


class Handling:
    def __call__(self, signum, frame):
        raise Interrupted

    def handle(self, signum, frame):
        raise Interrupted


HANDLERS = {
    "plain": plain,
    "deleting": deleting,
    "uninstalling": uninstalling,
    "taking anything": taking_anything,
    "calling": calling,
    "partial": functools.partial(with_more, 1),
    "object": Handling(),
    "method": Handling().handle,
    "lambda": lambda *arguments: plain(*arguments),
}


@pytest.fixture
def handle():
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def send(*arguments):
    signal.raise_signal(signal.SIGUSR1)


class Signalling(Backend):
    def add_scalar(self, series, value, step):
        send()


def step(bus, *subscribers, log_level=None):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=bus) as exporter:
        exporter.add_modules(model)
        for subscriber in subscribers:
            bus.register_subscriber(subscriber)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()


@pytest.mark.fault(303)
@pytest.mark.parametrize("handler", HANDLERS.values(), ids=HANDLERS)
@pytest.mark.parametrize("kind", ["weights", "batch_finished"])
def test_the_exception_of_a_handler_that_interrupts_a_subscriber_reaches_the_user(bus, handle, handler, kind):
    handle(handler)
    with pytest.raises(Interrupted):
        step(bus, CallbackSubscriber(kind, send, backend="null"))


@pytest.mark.fault(303)
def test_it_also_does_if_the_subscriber_raises_another_exception_because_of_it(bus, handle):
    def convert(message):
        try:
            send()
        except Interrupted as error:
            raise ValueError("this metric has failed") from error

    handle(plain)
    with pytest.raises(Interrupted):
        step(bus, CallbackSubscriber("weights", convert, backend="null"))


@pytest.mark.fault(303)
def test_it_also_does_from_a_debugger(bus):
    def quit_debugger(frame, event, arg):
        raise Interrupted

    def traced(message):
        sys.settrace(quit_debugger)
        plain(None, None)

    with pytest.raises(Interrupted):
        step(bus, CallbackSubscriber("weights", traced, backend="null"))


@pytest.mark.fault(303)
def test_it_also_does_from_a_backend(bus, handle):
    handle(plain)
    with pytest.raises(Interrupted):
        step(bus, NormSubscriber("weights", backend=Signalling()))


class TimeLimit:
    """Raises an exception after a given time, and counts those that reach neither the user nor ikkuna.

    Python ignores exceptions in the callbacks of weak references.
    """

    def __init__(self, error):
        self.error, self.ignored = error, 0

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._expire), sys.unraisablehook
        sys.unraisablehook = self._ignore
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGALRM, self._before[0])
        sys.unraisablehook = self._before[1]

    def _expire(self, signum, frame):
        raise self.error

    def _ignore(self, unraisable):
        self.ignored += unraisable.exc_type is self.error

    def interrupts(self, seconds, function):
        """Call a function until it is interrupted; return whether the exception came."""
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                function()
        except self.error:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            torch.set_grad_enabled(True)  # torch.no_grad() does not restore it if it is interrupted at its end
        return False


@pytest.mark.fault(303)
@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, ValueError, OSError, MemoryError])
def test_it_also_does_at_any_moment_of_a_step(bus, error, caplog):
    """A time limit that raises a common type of exception interrupts the step at random moments."""
    count, chance = 40, random.Random(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    caplog.set_level(logging.CRITICAL, "ikkuna")  # the standard library's handlers ignore exceptions while they write
    with Exporter(message_bus=bus) as exporter, TimeLimit(error) as limit:
        exporter.add_modules(model)
        for kind in ("activations", "layer_gradients", "weights", "weight_updates"):
            bus.register_subscriber(NormSubscriber(kind, backend=RecordingBackend()))
        train()  # torch imports modules
        arrived = sum(limit.interrupts(chance.uniform(1e-4, 3e-3), train) for _ in range(count))
        health = exporter.health()
    assert (arrived + limit.ignored, health.errors, health.disabled) == (count, 0, ())


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 50:
            time.sleep(60)
        return torch.ones(2)


@pytest.mark.fault(303)
def test_the_death_of_a_data_loaders_worker_is_reported_while_a_subscriber_runs(bus):
    """torch reports it by an exception of its handler of SIGCHLD."""
    loader = iter(torch.utils.data.DataLoader(Numbers(), num_workers=1, prefetch_factor=60))
    next(loader)
    [worker] = loader._workers

    def end_worker(message):
        os.kill(worker.pid, signal.SIGKILL)
        for _ in range(1000):
            time.sleep(0.01)

    with pytest.raises(RuntimeError, match="DataLoader worker .* is killed by signal"):
        step(bus, CallbackSubscriber("weights", end_worker, backend="null"))
