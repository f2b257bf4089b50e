"""Threads that work beside training."""

import _thread
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

from ikkuna.support.failures import log, raise_users_exception

P = ParamSpec("P")
T = TypeVar("T")

START_SECONDS = 0.5
"""How long those wait who need a thread that was just started."""


def computed_once(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that keeps its results, of which threads that call it at the same time get the same one.

    `functools.cache` calls the function in each of these threads, and returns different results to them.

    Examples
    --------
    >>> made = computed_once(lambda: object())
    >>> made() is made()
    True
    """
    found: Any = cache(function)
    locks = {os.getpid(): threading.RLock()}

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        if (lock := locks.get(os.getpid())) is None:  # a thread that this process lacks may hold the lock of its parent
            lock = locks.setdefault(os.getpid(), threading.RLock())
        with lock:
            result: T = found(*arguments, **options)
        return result

    vars(call)["cache_clear"] = found.cache_clear
    return call


def run_apart(body: Callable[[], object], name: str, end: Callable[[], object] | None = None) -> None:
    """Run a function on a thread of its own and wait for it, so that modes that belong to this thread do not concern it.

    Parameters
    ----------
    body : callable
        The function; it must not raise.
    name : str
        The name of the thread.
    end : callable, optional
        Called if the wait is interrupted, before the exception is raised when the function has returned.

    Examples
    --------
    >>> found = []
    >>> run_apart(lambda: found.append(threading.current_thread().name), "apart")
    >>> found
    ['apart']
    """
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        if end is not None:
            end()
        thread.join()
        raise


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

    def join(self, timeout: float | None = None) -> bool:
        """Return whether the thread has ended; wait for that at most `timeout` seconds."""
        return self._ended.wait(timeout)


class Worker:
    """A daemon thread that does jobs one after another, with one set of rules for all threads of the package.

    - The queue belongs to the caller, who bounds it, and changes it under :attr:`lock`.
    - Nothing waits for the thread: it starts when :meth:`wake` finds a job.  If the system refuses it, that is tried again
      after `retry_seconds`, and :meth:`wait_for` and :meth:`close` do the jobs in the calling thread.
    - One thread at a time does a job, without the lock.  An exception of a job is passed to `failed`, and the thread goes on;
      an exception that belongs to the user is raised, and the next :meth:`wake` starts another thread.
    - After :meth:`close` the thread ends when `next_job` returns ``None``, also if it returns jobs again later.
    - A forked process has no such thread: :attr:`process` is another one there, and all methods do nothing.

    Parameters
    ----------
    name : str
        The name of the thread.
    next_job : callable
        Returns the job to do now, or ``None``.  It is called with the lock, and changes nothing.
    due : callable, optional
        Returns the time of `time.monotonic` at which `next_job` is called again without :meth:`wake`; by default never.
    failed : callable, optional
        Called with the exception of a job; by default it is logged.
    finish : callable, optional
        The last job.
    retry_seconds : float
        Pause after the system has refused a thread.

    Attributes
    ----------
    process : int
        The process that has created the worker; -1 in a forked one.
    lock : threading.RLock
        Guards what `next_job` reads; reentrant, because a signal handler may use the worker.
        ``with worker.lock:`` is safe against a `KeyboardInterrupt`; a condition has methods in Python that can be interrupted
        while they hold the lock.
    changed : threading.Condition
        Notified after each job.

    Examples
    --------
    >>> queue, done = [1, 2, 3], []
    >>> worker = Worker("example", lambda: (lambda: done.append(queue.pop(0))) if queue else None)
    >>> worker.wake(); worker.close(), done
    (True, [1, 2, 3])
    """

    def __init__(
        self,
        name: str,
        next_job: Callable[[], Callable[[], object] | None],
        *,
        due: Callable[[], float] = lambda: math.inf,
        failed: Callable[[BaseException], object] | None = None,
        finish: Callable[[], object] = lambda: None,
        retry_seconds: float = 10.0,
    ) -> None:
        self._name = name
        self._next_job = next_job
        self._due = due
        self._failed = failed or self._log
        self._finish = finish
        self._retry_seconds = retry_seconds
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._thread: BackgroundThread | None = None
        self._started_at = self._start_at = 0.0
        self._has_logged_refusal = False
        self.is_served = False
        """Whether the thread runs."""
        self._busy: int | None = None  # the thread that does a job
        self.is_closing = self.is_finished = False
        # native code can fork without calling the hook, and a process id can be used again: hence a mark and a comparison
        self.process = os.getpid()
        _workers.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a job is being done."""
        return self._busy is not None

    @property
    def is_current(self) -> bool:
        """Whether the calling thread does a job."""
        return self._busy == threading.get_ident()

    def wake(self) -> None:
        """Wake the thread, which takes the next job; start it if it does not run."""
        if self.process == os.getpid():
            with self.lock:
                self.changed.notify_all()
                if not (self.is_served or self.is_finished):
                    self._start()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until `predicate` returns ``True``, or the worker is finished; return the last answer.

        If no thread can be started, this thread does the jobs, however long they take.  A job does not wait for itself.
        """
        if self.process != os.getpid():
            return False
        self._work_here(timeout)
        with self.lock:
            if not self.is_current:
                self.changed.wait_for(lambda: predicate() or self.is_finished, timeout)
            return predicate()

    def close(self, timeout: float | None = None) -> bool:
        """Do the jobs that are left, and end; return whether that was done within `timeout` seconds.

        In a job it returns at once, and the rest is done afterwards.
        """
        if self.process != os.getpid():
            return False
        with self.lock:
            self.is_closing, self._start_at = True, 0.0
            self.wake()
        return self.wait_for(lambda: self.is_finished, timeout)

    def _end(self) -> None:
        try:
            self._finish()
        finally:
            self.is_finished = True

    def _start(self) -> None:
        """Start the thread if it is needed and does not run; try again after a pause if it does not begin."""
        now, earlier = time.monotonic(), self._thread
        if earlier is not None and now < self._start_at:
            return
        if self._next_job() is None and (self.is_closing or self._due() == math.inf):
            return
        if earlier is not None and earlier.may_begin and now < self._started_at + START_SECONDS:
            return
        self._started_at, self._start_at = now, now + self._retry_seconds
        self._thread = BackgroundThread(self._run, self._name)
        is_refused = not self._thread.start() or (earlier is not None and not earlier.has_begun())
        if is_refused and not self._has_logged_refusal:
            self._has_logged_refusal = True
            log.error(
                "%s: no thread can be started; its work waits until one can, or until flush() or close()", self._name
            )

    def _run(self) -> None:
        with self.lock:
            if self.is_served or self.is_finished:  # another one was started in the meantime
                return
            self.is_served = True
            self.changed.notify_all()
        try:
            while self._wait_for_job():
                self._attempt()
        finally:
            with self.lock:
                self.is_served = False

    def _wait_for_job(self) -> bool:
        """Wait for a job; return ``False`` when the worker is finished."""
        with self.lock:
            while not self.is_finished:
                if self._busy is None and (self.is_closing or self._next_job() is not None):
                    return True
                pause = math.inf if self._busy is not None else self._due() - time.monotonic()
                self.changed.wait(None if pause == math.inf else min(max(pause, 0.0), threading.TIMEOUT_MAX))
        return False

    def _work_here(self, timeout: float | None) -> None:
        """If there is a job, and no thread can be started, do the jobs in this thread."""
        with self.lock:
            if self.is_served or self.is_busy or not (self.is_closing or self._next_job()):
                return
            thread = self._thread
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = START_SECONDS if timeout is None else min(timeout, START_SECONDS)
        if thread is not None and (thread.has_begun(patience) or (thread.may_begin and patience < START_SECONDS)):
            return
        while self._attempt() and (deadline is None or time.monotonic() < deadline):
            pass

    def _attempt(self) -> bool:
        """Do the next job, unless another thread does one; return whether there was one."""
        if self._busy is not None:
            return False
        try:
            with self.lock:
                if self._busy is not None or self.is_finished:
                    return False
                job = self._next_job() or (self._end if self.is_closing else None)
                if job is None:
                    return False
                self._busy = threading.get_ident()
            job()
        except BaseException as error:
            raise_users_exception(error)
            self._failed(error)
        finally:
            if self._busy == threading.get_ident():
                with self.lock:
                    self._busy = None
                    self.changed.notify_all()
        return True

    def _log(self, error: BaseException) -> None:
        log.error("%s failed (training is not affected)", self._name, exc_info=error)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


def _disown() -> None:
    for worker in list(_workers):
        worker.process = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown)
