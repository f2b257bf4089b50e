"""Threads that are started without waiting for them."""

import _thread
import threading
from collections.abc import Callable

from ikkuna.signal_handlers import raise_users_exception

__all__ = ["START_SECONDS", "BackgroundThread"]

START_SECONDS = 0.5
"""How long those wait who need a thread that was just started."""


class BackgroundThread:
    """A daemon thread.

    `threading.Thread.start` waits until the new thread runs; if it dies before, as it does without memory, it waits for ever.
    Here another thread calls that method, so :meth:`start` returns at once.

    Parameters
    ----------
    work : callable
        Called once in the thread.
    name : str
        The name of the thread.

    Examples
    --------
    >>> done = []
    >>> thread = BackgroundThread(lambda: done.append(1), "example")
    >>> thread.start(), thread.join(10.0), done
    (True, True, [1])
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._name = name
        self._is_begun = False
        self._identity: int | None = None
        self._settled, self._ended = threading.Event(), threading.Event()

    def start(self) -> bool:
        """Begin to start the thread; return ``False`` if the system refuses it."""
        try:
            _thread.start_new_thread(self._start, ())
        except (RuntimeError, MemoryError) as error:
            raise_users_exception(error)
            self._settled.set()
            return False
        return True

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError):
            self._settled.set()

    def _run(self) -> None:
        self._identity = threading.get_ident()
        self._is_begun = True
        self._settled.set()
        try:
            self._work()
        finally:
            self._ended.set()

    def has_begun(self, timeout: float | None = 0.0) -> bool:
        """Return whether the thread runs or has run; wait for it at most `timeout` seconds."""
        self._settled.wait(timeout)
        return self._is_begun

    @property
    def may_begin(self) -> bool:
        """Whether the system has neither refused the thread nor begun it."""
        return not self._settled.is_set()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._is_begun and not self._ended.is_set()

    @property
    def is_current(self) -> bool:
        """Whether this is the calling thread: the garbage collector can close a run in any thread."""
        return self.is_alive() and self._identity == threading.get_ident()

    def join(self, timeout: float | None = None) -> bool:
        """Return whether the thread has ended; wait for that at most `timeout` seconds."""
        return self._ended.wait(timeout)
