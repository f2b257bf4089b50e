"""Measures which share of the training time ikkuna takes."""

import threading
import time
from collections.abc import Callable

__all__ = ["Stopwatch"]


class _Local(threading.local):
    depth = 0
    since = 0.0


class Stopwatch:
    """Adds up the time between `start` and `stop` on each thread; nested pairs are counted once.

    Parameters
    ----------
    others : callable, optional
        Returns the seconds that were measured elsewhere, outside of such pairs.

    Attributes
    ----------
    spent : float
        Seconds between `start` and `stop`, on all threads together.

    Examples
    --------
    >>> watch = Stopwatch()
    >>> watch.start(), watch.start(), watch.stop(), watch.stop()
    (None, None, None, None)
    >>> 0 < watch.spent < 1, watch.overhead
    (True, 0.0)
    """

    def __init__(self, others: Callable[[], float] = float) -> None:
        self.spent = 0.0
        self._others = others
        self._local = _Local()
        self._began: float | None = None
        self._ended = 0.0
        self._spent_before = self._spent_until_end = 0.0
        self._lap: tuple[float, float] | None = None

    def start(self) -> None:
        """Start to count."""
        local = self._local
        local.depth += 1
        if local.depth == 1:
            local.since = time.perf_counter()

    def stop(self) -> None:
        """Stop to count."""
        local = self._local
        local.depth -= 1
        if local.depth == 0:
            self.spent += time.perf_counter() - local.since

    def restart(self) -> None:
        """Start to count at an outermost `start` of this thread, after exceptions have left starts without their stops."""
        self._local.depth, self._local.since = 1, time.perf_counter()

    def lap(self) -> tuple[float, float] | None:
        """Return the seconds since the last call and how many of them ikkuna took; ``None`` for the first call."""
        now = time.perf_counter()
        spent = self._spent_until(now)
        before, self._lap = self._lap, (now, spent)
        return None if before is None else (now - before[0], spent - before[1])

    def step_ended(self, beside: float = 0.0) -> None:
        """Mark the end of a step; the first one is left out, because it creates what the others reuse.

        Parameters
        ----------
        beside : float
            Seconds so far that other threads of ikkuna have kept the interpreter busy.
        """
        self._ended = time.perf_counter()
        self._spent_until_end = self._spent_until(self._ended) + beside
        if self._began is None:
            self._began, self._spent_before = self._ended, self._spent_until_end

    def _spent_until(self, now: float) -> float:
        """Return the seconds that were spent, including the pair that is open on this thread."""
        return self.spent + self._others() + (now - self._local.since if self._local.depth else 0.0)

    @property
    def overhead(self) -> float:
        """Time that ikkuna took as a share of the remaining time, from the second step on; 0 before.

        It can be larger than the slowdown, because a training step and another thread may run at the same time.
        """
        if self._began is None:
            return 0.0
        own = self._spent_until_end - self._spent_before
        others = self._ended - self._began - own
        return own / others if others > 0 else 0.0
