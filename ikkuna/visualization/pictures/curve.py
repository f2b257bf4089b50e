"""A curve of bounded size."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.pictures.decimator import Decimator

__all__ = ["CAPACITY", "Curve"]

CAPACITY = 512
"""Largest number of points, apart from the first and the last: more than the eye can distinguish in a picture."""

_Point = tuple[int, float]


class _Extremes(NamedTuple):
    """The points with the least and the greatest value of consecutive steps."""

    low: _Point
    high: _Point


class Curve:
    """Keeps the first and the last value of a series, and the least and the greatest value of each group of steps.

    All values are kept while there are at most `capacity` of them.
    NaN is less than every number, so that it is never merged away.

    Parameters
    ----------
    capacity : int
        Largest number of points, apart from the first and the last; a multiple of 4.

    Examples
    --------
    >>> curve = Curve(capacity=8)
    >>> for step in range(100):
    ...     curve.add(step, 9.0 if step == 42 else 0.0)
    >>> steps, values = curve.points()
    >>> len(steps) <= 8 + 2, steps[values == 9.0].tolist(), steps[[0, -1]].tolist()
    (True, [42], [0, 99])
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._extremes = Decimator(capacity // 2, _merge)
        self._first: _Point | None = None
        self._last: _Point | None = None

    def add(self, step: int, value: float) -> None:
        """Add a value."""
        self._last = point = step, value
        if self._first is None:
            self._first = point
        self._extremes.add(_Extremes(point, point))

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values, as copies."""
        kept = [point for extremes in self._extremes.entries() for point in extremes]
        ends = [point for point in (self._first, self._last) if point is not None]
        values = dict(sorted((*kept, *ends), key=lambda point: point[0]))
        return np.array(list(values), np.int64), np.array(list(values.values()), np.float64)


def _merge(a: _Extremes, b: _Extremes) -> _Extremes:
    """Return the extremes of both; of equal values the outermost, so that two items stay two points."""
    low = b.low if b.low[1] < a.low[1] or (_is_nan(b.low) and not _is_nan(a.low)) else a.low
    high = a.high if a.high[1] > b.high[1] or (_is_nan(b.high) and not _is_nan(a.high)) else b.high
    return _Extremes(low, high)


def _is_nan(point: _Point) -> bool:
    return point[1] != point[1]  # math.isnan() takes twice as long
