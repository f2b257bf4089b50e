"""Where the values of many modules lie, over the steps, in bounded size."""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Band", "Margins"]

_CAPACITY = 256
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_EDGES = len(_SHARES)


@dataclass(frozen=True, eq=False)
class Band:
    """Least value, quartiles and greatest value of some modules.

    Parameters
    ----------
    steps : (point,)
    values : (5, point)
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Margins:
    """Takes the values of all modules at a step after another.

    When its room is used up, every two points become one: the least of both, the means of quartiles, the greatest.
    A NaN among the values of a step makes all of that step NaN: a layer that has exploded must not disappear among healthy ones.

    Examples
    --------
    >>> margins = Margins()
    >>> margins.add(7, [4.0, 1.0, 2.0, 3.0, 5.0])
    >>> band = margins.band()
    >>> band.steps.tolist(), band.values[:, 0].tolist()
    ([7], [1.0, 2.0, 3.0, 4.0, 5.0])
    """

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")
        self._last: list[list[float]] = []  # of a group that is not full
        self._first = 0
        self._group = 1

    def add(self, step: int, values: list[float]) -> None:
        """Take the values of a step, of which there is at least one."""
        if not self._last:
            self._first = step
        self._last.append(_margins(values))
        if len(self._last) < self._group:
            return
        self._steps.append(self._first)
        self._values.extend(_merged(np.array(self._last).T[:, None])[:, 0].tolist())
        self._last.clear()
        if len(self._steps) == _CAPACITY:
            self._thin_out()

    def _thin_out(self) -> None:
        pairs = np.array(self._values).reshape(-1, 2, _EDGES).transpose(2, 0, 1)
        self._values = array("d", _merged(pairs).T.reshape(-1).tolist())
        self._steps = self._steps[::2]
        self._group *= 2

    def band(self) -> Band:
        """Return a copy of what is held."""
        steps, values = list(self._steps), np.array(self._values).reshape(-1, _EDGES).T
        if self._last:
            steps.append(self._first)
            values = np.concatenate([values, _merged(np.array(self._last).T[:, None])], 1)
        return Band(np.array(steps, np.int64), values)


def _margins(values: list[float]) -> list[float]:
    if any(value != value for value in values):  # NaN; math.isnan() costs twice as much
        return [float("nan")] * _EDGES
    ordered = sorted(values)
    return [_quantile(ordered, share) for share in _SHARES]


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = ordered[int(place)]
    high = ordered[min(int(place) + 1, len(ordered) - 1)]
    return low if low == high else low + (place - int(place)) * (high - low)


def _merged(groups: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the margins of each group: (5, point) of (5, point, member)."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinities of both signs have no mean
        merged: NDArray[np.float64] = groups.mean(2)
    merged[0], merged[-1] = groups[0].min(1), groups[-1].max(1)
    return merged
