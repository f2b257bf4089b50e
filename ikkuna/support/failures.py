"""The logger of the library, counters of failures, and the exceptions that belong to the user.

Python runs a signal handler between two instructions of whatever function runs on the main thread.
Its exception, such as that of a time limit or of a dead worker process, then appears to come from that function.
"""

import contextlib
import functools
import inspect
import logging
import signal
from collections.abc import Hashable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

from ikkuna.errors import StopTraining

__all__ = ["FailureCounter", "log", "raise_users_exception", "suppressed", "users_exception"]


class FailureCounter:
    """Counts consecutive failures, separately for each key.

    Parameters
    ----------
    limit : int
        Number of consecutive failures after which :meth:`is_exhausted` returns ``True``.

    Attributes
    ----------
    counts : dict of Hashable to int
        The number of consecutive failures of each key that failed last.

    Examples
    --------
    >>> failures = FailureCounter(limit=2)
    >>> failures.add("measure"), failures.add("measure"), failures.is_exhausted("measure")
    (1, 2, True)
    >>> failures.reset("measure")
    >>> failures.is_exhausted("measure")
    False
    """

    def __init__(self, limit: int = 10) -> None:
        self.limit = limit
        self.counts: dict[Hashable, int] = {}

    def add(self, key: Hashable = None) -> int:
        """Count a failure; return the number of consecutive failures of `key`."""
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count

    def reset(self, key: Hashable = None) -> None:
        """Forget the failures of `key` after a success."""
        self.counts.pop(key, None)

    def is_exhausted(self, key: Hashable = None) -> bool:
        """Return whether `key` has failed `limit` times in a row."""
        return self.counts.get(key, 0) >= self.limit

    @staticmethod
    def is_logged(count: int) -> bool:
        """Return whether the failure of this number is logged: the 1st, 10th, 100th …

        Examples
        --------
        >>> [count for count in range(1, 2000) if FailureCounter.is_logged(count)]
        [1, 10, 100, 1000]
        """
        return str(count).strip("0") == "1"


_REQUESTS = (KeyboardInterrupt, SystemExit, StopTraining)


def users_exception(error: BaseException) -> BaseException | None:
    """Return the exception that must be raised to the user, if `error` is one or was caused by one; otherwise ``None``.

    These are `KeyboardInterrupt`, `SystemExit`, `StopTraining`, and every exception that was raised in a signal handler.

    Examples
    --------
    >>> users_exception(KeyboardInterrupt())
    KeyboardInterrupt()
    >>> users_exception(ValueError("a metric failed")) is None
    True
    """
    found: BaseException | None = error
    for _ in range(100):  # exceptions can cause each other in a circle
        if found is None or isinstance(found, _REQUESTS) or _is_of_handler(found.__traceback__):
            return found
        found = found.__cause__
    return None


def raise_users_exception(error: BaseException) -> None:
    """Raise the exception that belongs to the user, see :func:`users_exception`; do nothing if there is none.

    Every ``except`` clause for a wide class of exceptions begins with this call if its code may run on the main thread.
    """
    if (users := users_exception(error)) is not None:
        raise users


def _is_of_handler(traceback: TracebackType | None) -> bool:
    """Return whether a traceback goes through a signal handler."""
    if traceback is None or (traceback := traceback.tb_next) is None:  # the first frame is that which catches the error
        return False
    installed = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while traceback is not None:
        frame = traceback.tb_frame
        # A handler that replaces itself before it raises is no longer installed, and one may delete its arguments.
        if frame.f_code in installed or _received_its_caller(frame):
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """Return the code of a handler; ``None`` if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _received_its_caller(frame: FrameType) -> bool:
    """Return whether a function was called with the frame that it interrupted, as only signal handlers are."""
    arguments = inspect.getargvalues(frame)
    values = [arguments.locals.get(name) for name in arguments.args]
    values += arguments.locals.get(arguments.varargs, ()) if arguments.varargs else ()
    return frame.f_back is not None and any(value is frame.f_back for value in values)


@contextlib.contextmanager
def suppressed(*types: type[BaseException]) -> Iterator[None]:
    """Suppress exceptions of some types in the body, except those that belong to the user.

    Examples
    --------
    >>> with suppressed(OSError):
    ...     raise TimeoutError
    """
    try:
        yield
    except types as error:
        raise_users_exception(error)


class _SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """Passes records to a logger, and ignores the exceptions of its handlers and filters.

    A handler of the user must neither stop a thread of ikkuna nor raise into the training loop.
    Without any handler a record is written to the standard error stream, and begins with ``ikkuna:``.

    Examples
    --------
    >>> failing = logging.Logger("failing")
    >>> failing.addFilter(lambda record: 1 / 0)
    >>> _SafeLogger(failing).warning("not shown")
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a record; its source is the caller of :meth:`warning`, :meth:`error` and so on."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if not self.logger.hasHandlers():
            msg = f"ikkuna: {msg}"
        with suppressed(Exception):
            super().log(level, msg, *args, **kwargs)


log = _SafeLogger(logging.getLogger("ikkuna"))
"""Logs to the logger ``"ikkuna"`` of the standard library, which the user may configure."""
