"""The logger, counters of failures, the exceptions that belong to the user, and what is restored in spite of them.

Python runs a signal handler between two instructions of whatever function runs on the main thread.
Its exception, such as that of a time limit or of a dead worker process, then appears to come from that function.
"""

import _signal  # type: ignore[import-not-found]  # signal.getsignal() creates an enumeration at each call
import contextlib
import dis
import functools
import inspect
import logging
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from ikkuna.errors import StopTraining
from ikkuna.printable import printable

T = TypeVar("T")
_REQUESTS = (KeyboardInterrupt, SystemExit, StopTraining)
_SIGNALS = tuple(map(int, signal.valid_signals()))
_OVERWRITTEN = object()
_EVENTS = frozenset(("call", "line", "return", "exception", "opcode"))
# an exception may have properties of these names
_cause = BaseException.__dict__["__cause__"].__get__
_traceback = BaseException.__dict__["__traceback__"].__get__


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
        if found is None or issubclass(type(found), _REQUESTS) or _is_of_handler(_traceback(found)):
            return found
        found = _cause(found)
    return None


def raise_users_exception(error: BaseException) -> None:
    """Raise the exception that belongs to the user, see :func:`users_exception`; do nothing if there is none.

    Every ``except`` clause for a wide class of exceptions begins with this call if its code may run on the main thread.
    """
    if (users := users_exception(error)) is not None:
        raise users


class _Handlers:
    """The signal handlers that were installed when :meth:`remember` was called.

    A handler that removes itself before it raises is recognised by them.

    Attributes
    ----------
    signals : set of int
        The signals that have had a handler in Python.
    codes : set of CodeType
        The code of these handlers, as far as they are functions, methods, or objects with a ``__call__`` in Python.
    """

    def __init__(self) -> None:
        self.signals: set[int] = set()
        self.codes: set[CodeType] = set()
        self._latest: list[Any] = []

    def remember(self) -> None:
        """Add the handlers that are installed now; this takes some microseconds."""
        handlers = [*map(_signal.getsignal, _SIGNALS)]
        if handlers == self._latest:
            return
        self._latest = handlers
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            if not isinstance(handler, int | None) and handler is not signal.default_int_handler:
                self.signals.add(number)
                if (code := _code(handler)) is not None:
                    self.codes.add(code)


_HANDLERS = _Handlers()
remember_handlers = _HANDLERS.remember


def _code(handler: Any) -> CodeType | None:
    """Return the code of a handler; ``None`` if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    code = getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_of_handler(traceback: TracebackType | None) -> bool:
    """Return whether a traceback goes through the call of a signal handler by Python itself."""
    if traceback is None or threading.get_ident() != threading.main_thread().ident:  # handlers run on the main thread
        return False
    remember_handlers()
    while (traceback := traceback.tb_next) is not None:  # the first frame is that which catches the error
        if _is_called_by_python(traceback.tb_frame):
            return True
    return False


def _is_called_by_python(frame: FrameType) -> bool:
    """Return whether Python has called a function as the handler of a signal, or as the trace function of a debugger.

    Its arguments are then the number of the signal, which is no member of an enumeration, and the frame of the function that
    was interrupted, which is the caller.  Nothing but a handler receives both.
    A handler may overwrite or delete its arguments; that of which the code is known is recognised by the other one.
    A trace function receives the frame of its caller and the name of an event.
    """
    caller, code, values = frame.f_back, frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    lost = _overwritten(code) if code in _HANDLERS.codes else frozenset()
    arguments = [_OVERWRITTEN if name in lost else values.get(name) for name in names]
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += rest if isinstance(rest, tuple) else ()
    return caller is not None and any(
        (
            (first is _OVERWRITTEN or (type(first) is int and first in _HANDLERS.signals))
            and (second is _OVERWRITTEN or second is caller)
        )
        or (first is caller and type(second) is str and second in _EVENTS)
        for first, second in pairwise(arguments)
    )


def _overwritten(code: CodeType) -> frozenset[Any]:
    """Return the names of the variables that a function assigns or deletes."""
    changes = [i.argval for i in dis.get_instructions(code) if i.opname.startswith(("STORE_", "DELETE_"))]
    return frozenset(name for names in changes for name in (names if isinstance(names, tuple) else (names,)))


def restoring(body: Callable[[], T], restore: Callable[[], object]) -> T:
    """Return the result of `body`, and call `restore` afterwards.

    If an exception such as `KeyboardInterrupt` interrupts `restore`, it is called again.

    Examples
    --------
    >>> restoring(lambda: 3, lambda: print("restored"))
    restored
    3
    """
    try:
        try:
            return body()
        finally:
            restore()
    except BaseException:
        restore()
        raise


Switch = tuple[Callable[[Any], object], Any, Any]
"""A function that sets a global switch of torch, the present value of the switch, and another value."""


def switched(switches: Sequence[Switch], function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, during which global switches of torch have other values.

    The end of ``torch.no_grad()`` is a call of a Python function; an exception such as `KeyboardInterrupt` that comes at its
    beginning would leave training without gradients.  This function restores the switches nevertheless.

    Examples
    --------
    >>> values = [1]
    >>> switched([(values.append, 1, 2)], lambda: values[-1]), values
    (2, [1, 2, 1])
    """
    try:
        try:
            for set_value, _, value in switches:
                set_value(value)
            return function(*arguments)
        finally:
            for set_value, before, _ in switches:
                set_value(before)
    except BaseException:
        for set_value, before, _ in switches:
            set_value(before)
        raise


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


class FailureCounter:
    """Counts consecutive failures, separately for each key.

    Attributes
    ----------
    counts : dict of Hashable to int
        The number of consecutive failures of each key that failed last.

    Examples
    --------
    >>> failures = FailureCounter()
    >>> [failures.add("measure") for _ in range(10)][-1], failures.is_exhausted("measure")
    (10, True)
    >>> failures.reset("measure")
    >>> failures.is_exhausted("measure")
    False
    """

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}

    def add(self, key: Hashable = None) -> int:
        """Count a failure; return the number of consecutive failures of `key`."""
        count = self.counts[key] = self.counts.get(key, 0) + 1
        return count

    def reset(self, key: Hashable = None) -> None:
        """Forget the failures of `key` after a success."""
        self.counts.pop(key, None)

    def is_exhausted(self, key: Hashable = None) -> bool:
        """Return whether `key` has failed 10 times in a row."""
        return self.counts.get(key, 0) >= 10

    @staticmethod
    def is_logged(count: int) -> bool:
        """Return whether the failure of this number is logged: the 1st, 10th, 100th …

        Examples
        --------
        >>> [count for count in range(1, 2000) if FailureCounter.is_logged(count)]
        [1, 10, 100, 1000]
        """
        return str(count).strip("0") == "1"


def error_text(error: BaseException) -> str:
    """Return the class of an exception and its text in one line, also if the text cannot be read.

    Examples
    --------
    >>> error_text(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    except Exception as unreadable:
        raise_users_exception(unreadable)
        text = f"its text cannot be read ({type(unreadable).__name__})"
    return printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


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
        with suppressed(BaseException):
            super().log(level, msg, *args, **kwargs)


def _make_printable(record: logging.LogRecord) -> bool:
    """Remove what would control a terminal from a record and its traceback, before a handler formats it."""
    record.msg = printable(str(record.msg), multiline=True)
    if isinstance(record.args, tuple):
        record.args = tuple(map(_printable_argument, record.args))
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        try:
            text = logging.Formatter().formatException(record.exc_info)
        except Exception as unreadable:  # properties of an exception may fail
            raise_users_exception(unreadable)
            text = error_text(error)
        record.exc_text = printable(text, multiline=True)
    return True


def _printable_argument(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, BaseException):
        return error_text(value).removeprefix(f"{type(value).__name__}: ")
    return printable(str(value), multiline=not isinstance(value, str))


log = _SafeLogger(logging.getLogger("ikkuna"))
log.logger.addFilter(_make_printable)
"""Logs to the logger ``"ikkuna"`` of the standard library, which the user may configure."""
