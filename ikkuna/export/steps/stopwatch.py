"""How much of the training thread's time is ours."""

import time

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the time between `start` and `stop`; what is started inside is counted once.

    Attributes
    ----------
    spent : seconds that were ours

    Examples
    --------
    >>> watch = Stopwatch()
    >>> watch.start(), watch.start(), watch.stop(), watch.stop()
    (None, None, None, None)
    >>> 0 < watch.spent < 1, watch.overhead
    (True, 0.0)
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._depth = 0
        self._since = 0.0
        self._began: float | None = None
        self._spent_before = 0.0
        self._ended = 0.0
        self._lap: tuple[float, float] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._depth += 1
        if self._depth == 1:
            self._since = time.perf_counter()

    def stop(self) -> None:
        """Cease to count."""
        self._depth -= 1
        if self._depth == 0:
            self.spent += time.perf_counter() - self._since

    def lap(self) -> tuple[float, float] | None:
        """Return the seconds since the last lap and how many of them were ours; ``None`` for the first."""
        now = time.perf_counter()
        spent = self.spent + (now - self._since if self._depth else 0.0)
        before, self._lap = self._lap, (now, spent)
        return None if before is None else (now - before[0], spent - before[1])

    def step_over(self) -> None:
        """Note that a step is over; the first is left out, since it makes what the others use."""
        self._ended = time.perf_counter()
        if self._began is None:
            self._began, self._spent_before = self._ended, self.spent

    @property
    def overhead(self) -> float:
        """Time that was ours as a share of the time that was not, from the second step on; 0 before."""
        if self._began is None:
            return 0.0
        ours = self.spent - self._spent_before
        others = self._ended - self._began - ours
        return ours / others if others > 0 else 0.0
