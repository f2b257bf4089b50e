"""Runs a function for many arguments in several threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from ikkuna.background import BackgroundThread

__all__ = ["WorkerPool", "stop_workers", "worker_pool"]


class WorkerPool:
    """Threads that help the calling thread; it does everything itself if they cannot be started.

    Parameters
    ----------
    helpers : int
        Number of threads besides the calling one.

    Examples
    --------
    >>> results = []
    >>> WorkerPool(1).run(results.append, [(1,), (2,), (3,)])
    >>> sorted(results)
    [1, 2, 3]
    """

    def __init__(self, helpers: int) -> None:
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._helpers = [BackgroundThread(self._help, "ikkuna-worker") for _ in range(helpers)]
        for helper in self._helpers:
            helper.start()

    def _help(self) -> None:
        while (batch := self._batches.get()) is not None:
            batch.work()

    def stop(self) -> None:
        """End the threads after the batches that wait; later batches are worked on in the calling thread."""
        helpers, self._helpers = self._helpers, []
        for _ in helpers:
            self._batches.put(None)

    def run(self, job: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Call `job` with each of the arguments; when this returns or raises, no call is running."""
        batch = _Batch(job, arguments)
        for helper in self._helpers[: len(batch.waiting) - 1]:
            if helper.has_begun():
                self._batches.put(batch)
        batch.work()
        batch.join()


class _Batch:
    def __init__(self, job: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> None:
        self._job = job
        self.waiting = deque(arguments)
        self._running = len(self.waiting)
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(self) -> None:
        """Call the job with arguments until none is left."""
        while True:
            try:
                arguments = self.waiting.popleft()
            except IndexError:
                return
            error: BaseException | None = None
            try:
                self._job(*arguments)
            except BaseException as raised:
                error = raised
            self._done.put(error)

    def join(self) -> None:
        """Wait for the calls in other threads, and raise the first error."""
        errors = [self._done.get() for _ in range(self._running)]
        if (error := next(filter(None, errors), None)) is not None:
            raise error


_POOLS: dict[tuple[int, int], WorkerPool] = {}  # by the number of helpers and the process


def worker_pool(threads: int) -> WorkerPool:
    """Return the pool of this process; a child process does not inherit the threads of its parent."""
    key = threads - 1, os.getpid()
    return _POOLS.get(key) or _POOLS.setdefault(key, WorkerPool(threads - 1))


def stop_workers() -> None:
    """End the threads of this process; `worker_pool` starts others."""
    for key in list(_POOLS):
        if key[1] == os.getpid() and (pool := _POOLS.pop(key, None)) is not None:
            pool.stop()
