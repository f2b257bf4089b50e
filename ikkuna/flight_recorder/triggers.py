"""Events that make the flight recorder write a dump without a rule."""

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ikkuna.numerics.statistics.table import COLUMN, Values

__all__ = ["CoolDown", "NonFiniteTrigger", "SpikeTrigger"]

_NANS, _INFS = COLUMN["nans"], COLUMN["infs"]  # these columns are neighbours
_NONE = np.zeros(0, np.int64)


class NonFiniteTrigger:
    """Finds rows that contain NaN or Inf, and did not when they were measured before.

    Infinities that a network uses from its first step on, such as those of an attention mask, raise no alarm.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.table import row_of
    >>> trigger = NonFiniteTrigger()
    >>> good, bad = np.stack([row_of(1.0), row_of(2.0)]), np.stack([row_of(1.0), row_of(math.nan)])
    >>> [trigger.update(table).tolist() for table in (good, good, bad, bad)]
    [[], [], [1], []]
    """

    def __init__(self) -> None:
        self._was_bad = np.zeros(0, np.bool_)
        self._is_known = np.zeros(0, np.bool_)
        self._any_was_bad = False

    def update(self, values: Values) -> NDArray[np.int64]:
        """Return the numbers of the rows that have become non-finite.

        Parameters
        ----------
        values : array
            ``(rows, columns)``
        """
        count = len(values)
        if count > len(self._is_known):
            more = np.zeros(count - len(self._is_known), np.bool_)
            self._was_bad, self._is_known = np.append(self._was_bad, more), np.append(self._is_known, more)
        measured = values[:, 0] > 0
        if not self._any_was_bad and not values[:, _NANS : _INFS + 1].any():
            self._is_known[:count] |= measured
            return _NONE
        bad = (values[:, _NANS] + values[:, _INFS]) > 0
        is_new = bad & self._is_known[:count] & ~self._was_bad[:count]
        self._is_known[:count] |= measured
        self._was_bad[:count] = np.where(measured, bad, self._was_bad[:count])
        self._any_was_bad = bool(self._was_bad.any())
        return np.flatnonzero(is_new)


class SpikeTrigger:
    """Finds a loss that is far above its last 32 values.

    Threshold: 8 robust deviations (median absolute deviation) above their median, and 1.5 times as far from the median as
    the largest of them.  It is computed again after every 8 values, so most steps cost one comparison.

    Examples
    --------
    >>> trigger = SpikeTrigger()
    >>> losses = [1.0 + 0.01 * (i % 5) for i in range(60)] + [9.0, 9.0]
    >>> [step for step, loss in enumerate(losses) if trigger.update(loss)]
    [60]
    """

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=32)
        self._threshold = math.inf
        self._count = 0

    def update(self, loss: float) -> bool:
        """Return whether the loss of a step is a spike, or has become NaN or infinite."""
        if loss <= self._threshold and loss != math.inf:
            self._add(loss)
            return False
        was_quiet, self._threshold = self._threshold < math.inf, math.inf
        is_bad = not math.isfinite(loss) and len(self._past) > 0
        self._past.clear()
        self._count = 0
        return was_quiet or is_bad

    def _add(self, loss: float) -> None:
        self._past.append(loss)
        self._count += 1
        if self._count < 40 or self._count % 8:
            return
        center = median(self._past)
        deviation = 1.4826 * median(abs(value - center) for value in self._past)
        largest = max(self._past) - center
        self._threshold = center + max(8 * deviation, 1.5 * largest, 1e-6 * abs(center))


class CoolDown:
    """Decides whether an automatic dump is written, so that a run that is broken does not write dumps for ever.

    Parameters
    ----------
    steps : int
        Number of steps after a dump without another one.
    limit : int
        Number of dumps of a run.

    Examples
    --------
    >>> cool_down = CoolDown(steps=100, limit=2)
    >>> [step for step in (10, 50, 150, 300) if cool_down.allows(step)]
    [10, 150]
    >>> cool_down = CoolDown(steps=100, limit=2)
    >>> [cool_down.allows(10), cool_down.allows(11, importance=1), cool_down.allows(12, importance=1)]
    [True, True, False]
    """

    def __init__(self, steps: int, limit: int) -> None:
        self._steps, self._left = steps, limit
        self._last: tuple[int, int] | None = None

    def allows(self, step: int, importance: int = 0) -> bool:
        """Return whether a dump may be written now, and count it.

        Parameters
        ----------
        step : int
            The step.
        importance : int
            A recent dump of less importance does not prevent this one.
        """
        is_recent = self._last is not None and self._last[1] >= importance and 0 <= step - self._last[0] < self._steps
        if not self._left or is_recent:
            return False
        self._left -= 1
        self._last = step, importance
        return True
