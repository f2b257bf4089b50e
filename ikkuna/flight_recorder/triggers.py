"""Events that make the flight recorder write a dump without a rule."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ikkuna.numerics.statistics.table import COLUMN, Values

AT_END = 2
"""The importance of a dump at the end of the process."""

_NANS, _INFS = COLUMN["nans"], COLUMN["infs"]  # these columns are neighbours
_NONE = np.zeros(0, np.int64)


class NonFiniteTrigger:
    """Finds rows that contain NaN or Inf, and did not when they were measured before.

    Infinities that a network uses from its first step on, such as those of an attention mask, raise no alarm.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.table import row_of
    >>> trigger = NonFiniteTrigger()
    >>> good, bad = np.stack([row_of(1.0), row_of(2.0)]), np.stack([row_of(1.0), row_of(np.nan)])
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


class CoolDown:
    """Decides whether an automatic dump is written, so that a run that is broken does not write dumps for ever.

    A dump that could not be written does not count.  One more dump than `limit` is kept for the end of the process.

    Parameters
    ----------
    steps : int
        Number of steps after a dump without another one; a tenth of it after a failure.
    limit : int
        Number of dumps of a run.

    Examples
    --------
    >>> def written(cool_down, *events):
    ...     return [step for step, importance in events if cool_down.allows(step, importance) and not cool_down.add(step, importance)]
    >>> written(CoolDown(steps=100, limit=2), (10, 0), (50, 0), (150, 0), (300, 0), (301, AT_END), (500, AT_END))
    [10, 150, 301]
    >>> written(CoolDown(steps=100, limit=2), (10, 0), (11, 1), (12, 1))
    [10, 11]
    """

    def __init__(self, steps: int, limit: int) -> None:
        self._steps, self._limit = steps, limit
        self._dumps: list[tuple[int, int, Callable[[], bool]]] = []
        self._retry = -1

    @property
    def is_used_up(self) -> bool:
        """Whether as many dumps are written as a run may have."""
        return len(self._dumps) >= self._limit

    def allows(self, step: int, importance: int = 0) -> bool:
        """Return whether a dump may be written now.

        Parameters
        ----------
        step : int
            The step.
        importance : int
            A recent dump of less importance does not prevent this one.  `AT_END` may use the dump that is kept.
        """
        failed = [dump for dump in self._dumps if dump[2]()]
        if failed:
            self._dumps = [dump for dump in self._dumps if dump not in failed]
            self._retry = failed[-1][0] + self._steps // 10
        is_end = importance >= AT_END
        if len(self._dumps) >= self._limit + (is_end and self._limit > 0):
            return False
        if self._dumps:
            last, its_importance, _ = self._dumps[-1]
            if its_importance >= importance and 0 <= step - last < self._steps:
                return False
        return is_end or step >= self._retry

    def add(self, step: int, importance: int = 0, has_failed: Callable[[], bool] = lambda: False) -> None:
        """Count a dump; `has_failed` returns whether it could not be written."""
        self._dumps.append((step, importance, has_failed))
