"""Threads that work beside training."""

import _thread
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from ikkuna.support.failures import raise_users_exception

__all__ = [
    "MOST_BYTES",
    "MOST_WORK",
    "START_SECONDS",
    "BackgroundThread",
    "DeviceThread",
    "Pending",
    "is_full",
    "run_beside",
]


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


T = TypeVar("T")

MOST_WORK = 4
"""Number of functions of one owner that may wait, or run, before no more are taken."""
MOST_BYTES = 1 << 30
"""Bytes on a device that functions which wait, or run, may refer to before no more are taken."""


class Pending(Generic[T]):
    """The result of a function that runs beside training.

    Parameters
    ----------
    work : callable
        Called once, by the thread or by :meth:`result`.

    Attributes
    ----------
    is_done : callable
        Returns what :meth:`arrived` returns, without a reference to the result.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claim = threading.Lock()
        self._done = threading.Event()
        self.is_done = self._done.is_set
        self._result: T
        self._error: Exception | None = None

    def run(self) -> None:
        """Call the function, unless that was done or is being done."""
        if not self._claim.acquire(blocking=False) or self._work is None:
            return
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        finally:
            self._work = None  # refers to tensors
            self._done.set()

    def arrived(self) -> bool:
        """Return whether the result is there."""
        return self._done.is_set()

    def result(self) -> T:
        """Return the result, or raise the exception of the function; wait if necessary."""
        self.run()  # if the thread has not begun
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def __call__(self) -> T:
        """Return the result as `result` does."""
        return self.result()


class DeviceThread:
    """Calls functions one after the other in a thread, which ends when there is nothing to do.

    What a function computes on a device, it computes on a stream of its own, after everything that the streams of the caller
    had to do when the function was added.

    Parameters
    ----------
    devices : iterable of torch.device
        The devices that the functions use.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._modules = [(device, torch.get_device_module(device)) for device in devices]
        self._streams: list[Any] = []
        self._queue: deque[Pending[Any]] = deque()
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], bool], int, int]] = []  # whether it is done, its owner and bytes
        self._is_running = False
        self._process = os.getpid()

    def is_full(self, owner: object) -> bool:
        """Return whether so many functions of `owner`, or so many bytes, wait that a further function would only wait longer."""
        with self._lock:
            self._waiting = [entry for entry in self._waiting if not entry[0]()]
            count = sum(known == id(owner) for _, known, _ in self._waiting)
            return count >= MOST_WORK or sum(size for *_, size in self._waiting) >= MOST_BYTES

    def add(self, work: Callable[[], T], owner: object = None, size: int = 0) -> Pending[T]:
        """Call a function later, and return its result to come; it refers to `size` bytes of the devices."""
        events = [module.current_stream(device).record_event() for device, module in self._modules]
        pending = Pending(lambda: self._on_own_streams(work, events))
        with self._lock:
            if self._process != os.getpid():  # the thread does not exist in a forked process
                self._process, self._is_running = os.getpid(), False
            self._queue.append(pending)
            self._waiting.append((pending.is_done, id(owner), size))
            starts, self._is_running = not self._is_running, True
        if starts and not BackgroundThread(self._run, "ikkuna device").start():
            self._run()
        return pending

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                pending = self._queue.popleft()
            pending.run()
            del pending

    def _on_own_streams(self, work: Callable[[], T], events: list[Any]) -> T:
        if not self._streams:
            self._streams = [module.Stream(device) for device, module in self._modules]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for stream, event, (_, module) in zip(self._streams, events, self._modules, strict=True):
                stack.enter_context(module.stream(stream))
                stream.wait_event(event)
            result = work()
            for stream in self._streams:  # before the memory of its tensors is used again by other streams
                stream.synchronize()
        return result


@cache
def _device_thread(devices: tuple[torch.device, ...]) -> DeviceThread:
    return DeviceThread(devices)


def _thread_of(devices: Iterable[torch.device]) -> DeviceThread | None:
    """Return the thread of some devices; ``None`` for the host, and for devices without streams, such as ``mps``."""
    found = tuple(sorted({device for device in devices if device.type != "cpu"}, key=str))
    if found and all(hasattr(torch.get_device_module(device), "Stream") for device in found):
        return _device_thread(found)
    return None


def is_full(devices: Iterable[torch.device], owner: object) -> bool:
    """Return whether work of `owner` on these devices is slower than it is added, so that more of it must not be added.

    So many functions wait or run, `MOST_WORK` of the owner, or refer to so many bytes, `MOST_BYTES` of all owners.

    Examples
    --------
    >>> is_full([torch.device("cpu")], None)
    False
    """
    thread = _thread_of(devices)
    return thread is not None and thread.is_full(owner)


def run_beside(
    devices: Iterable[torch.device], work: Callable[[], T], owner: object = None, size: int = 0
) -> Pending[T]:
    """Run a function that waits for devices beside training, in the order of the calls; on the host, run it at once.

    A device without streams, such as ``mps``, has to be waited for: it takes the function at once, too.

    Parameters
    ----------
    devices : iterable of torch.device
        The devices that the function uses.
    work : callable
        The function.
    owner : object
        On whose behalf it runs, see `is_full`.
    size : int
        The bytes on the devices that it keeps alive.

    Examples
    --------
    >>> pending = run_beside([torch.device("cpu")], lambda: 3)
    >>> pending.arrived(), pending.result()
    (True, 3)
    """
    if (thread := _thread_of(devices)) is not None:
        return thread.add(work, owner, size)
    pending = Pending(work)
    pending.run()
    return pending
