"""Catches, counts and logs the errors of subscribers and of ikkuna's own hooks, so that none reaches training."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ikkuna.errors import ConfigError
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics.statistics.native.hook_functions import NO_THREADS
from ikkuna.support.failures import FailureCounter, error_text, log, raise_users_exception, restoring

ON_ERROR = ("disable", "log", "raise")


class PermitHolder(Protocol):
    """Memory of permits that must end before a subscriber's code runs, see `Permits`."""

    threads: memoryview


class ThreadState(threading.local):
    """State of the current thread.

    Attributes
    ----------
    subscriber_is_running : bool
        Whether a subscriber's code runs on this thread.
    is_delivering : bool
        Whether events and results are being delivered; further ones come after them.
    """

    subscriber_is_running = False
    is_delivering = False


class ErrorGuard:
    """Calls the code of subscribers and handles its errors.

    Nothing is recorded while a subscriber's code runs: a subscriber that calls the model would otherwise observe its own call.

    Parameters
    ----------
    on_error : {'disable', 'log', 'raise'}
        ``"disable"``: a subscriber that fails 10 times in a row is disabled; ``"log"``: errors are only logged;
        ``"raise"``: errors are raised, for tests and authors of plugins.

    Attributes
    ----------
    errors : int
        Number of errors caught.
    disabled : list of str
        Names of the disabled subscribers, see `Registered.name`.
    thread : ThreadState
        State of the current thread.
    """

    def __init__(self, on_error: str = "disable") -> None:
        self.thread = ThreadState()
        self._holders: tuple[weakref.ref[PermitHolder], ...] = ()
        self.reset()
        self.set_policy(on_error)

    def reset(self) -> None:
        """Forget the errors of an earlier run."""
        self.errors = 0
        self.disabled: list[str] = []

    def run_recorded(self, body: Callable[[], None]) -> None:
        """Call a function and record although a subscriber's code runs, because the subscriber has started an evaluation."""
        before = dict(vars(self.thread))

        def run() -> None:
            self.thread.subscriber_is_running, self.thread.is_delivering = False, False
            body()

        restoring(run, lambda: vars(self.thread).update(before))

    def before_subscribers(self, holder: PermitHolder) -> None:
        """End the permits of an object, which is referred to weakly, before each call of a subscriber's code."""
        alive = (reference for reference in self._holders if reference() is not None)
        self._holders = (*alive, weakref.ref(holder))

    def set_policy(self, on_error: str) -> None:
        """Set what happens on an error; raise `ConfigError` for an unknown policy."""
        if on_error not in ON_ERROR:
            raise ConfigError(f"on_error must be one of {', '.join(ON_ERROR)}, got {on_error!r}")
        self.on_error = on_error

    def call(self, registered: Registered, stage: str, function: Callable[[Any], Any], argument: Any) -> Any:
        """Return ``function(argument)``, a call of a subscriber's code; count and log an error and return ``None``.

        Exceptions of the user's signal handlers are raised, and so are `KeyboardInterrupt` and `SystemExit`.
        """
        return self.call_each(registered, stage, function, (argument,))

    def call_each(
        self, registered: Registered, stage: str, function: Callable[[Any], Any], arguments: Iterable[Any]
    ) -> Any:
        """Call a function with each of several arguments, as :meth:`call` does with one; return the last result.

        An error with one of them loses no other, unless it disables the subscriber.
        """
        thread, failures, left, result, is_done = self.thread, registered.failures, iter(arguments), None, False
        while not is_done:
            before, began = thread.subscriber_is_running, time.perf_counter()
            try:
                try:
                    for reference in self._holders:
                        if (holder := reference()) is not None:
                            holder.threads[:] = NO_THREADS
                    thread.subscriber_is_running = True
                    for argument in left:
                        result = None
                        result = function(argument)
                        if failures.counts:
                            failures.reset(stage)
                    is_done = True
                finally:
                    thread.subscriber_is_running = before
                    registered.seconds += time.perf_counter() - began
            except BaseException as error:
                thread.subscriber_is_running = before
                self._report(registered, stage, error)
                is_done = registered.disabled
        return result

    def disable(self, registered: Registered, reason: str) -> None:
        """Count an error and disable a subscriber at once."""
        self.errors += 1
        self._disable(registered, reason)

    def report_internal(self, where: str, error: BaseException) -> None:
        """Count and log an error of ikkuna's own code; raise an exception that belongs to the user."""
        self._raise(error)
        self.errors += 1
        if FailureCounter.is_logged(self.errors):
            log.error("ikkuna failed in %s (training is not affected)", where, exc_info=error)

    def _raise(self, error: BaseException) -> None:
        """Raise the exception if it belongs to the user, or if every exception is to be raised."""
        raise_users_exception(error)
        if self.on_error == "raise":
            raise error

    def _report(self, registered: Registered, stage: str, error: BaseException) -> None:
        self._raise(error)
        self.errors += 1
        count = registered.failures.add(stage)
        if FailureCounter.is_logged(count):
            log.error("subscriber %s failed in %s", registered.label, stage, exc_info=error)
        is_exhausted = self.on_error == "disable" and registered.failures.is_exhausted(stage)
        if is_exhausted or isinstance(error, torch.OutOfMemoryError):
            self._disable(registered, f"{count} consecutive failures; last: {error_text(error)}")

    def _disable(self, registered: Registered, reason: str) -> None:
        if registered.disabled:
            return
        registered.disabled = True
        self.disabled.append(registered.name)
        log.error("subscriber %s disabled after %s", registered.label, reason)
