"""A curve of bounded size, however long the training."""

import math
from array import array

import numpy as np
from numpy.typing import NDArray

__all__ = ["CAPACITY", "Curve"]

CAPACITY = 512
"""Points; more than a picture is wide in pixels that the eye can tell apart."""


class Curve:
    """Takes the value of a step after another, and keeps what a picture can show.

    When its room is used up, the lowest and the highest of every four points stay, and of what follows the lowest and
    the highest of as many steps: a spike is never lost, and the picture stays that of all values.
    A NaN counts as both.

    Parameters
    ----------
    capacity : number of points, a multiple of 4

    Examples
    --------
    >>> curve = Curve(capacity=8)
    >>> for step in range(100):
    ...     curve.add(step, 9.0 if step == 42 else 0.0)
    >>> steps, values = curve.points()
    >>> len(steps) <= 8 + 32, steps[values == 9.0].tolist(), int(steps[-1])
    (True, [42], 99)
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._steps, self._values = array("q"), array("d")
        self._last_steps, self._last_values = array("q"), array("d")  # of a group that is not full
        self._group = 2  # values of which two are kept
        self._latest = (0, math.nan)

    def add(self, step: int, value: float) -> None:
        """Take a value."""
        self._latest = step, value
        self._last_steps.append(step)
        self._last_values.append(value)
        if len(self._last_steps) < self._group:
            return
        picked = _extremes(np.array(self._last_values)[None])[0]
        self._steps.extend(self._last_steps[i] for i in picked)
        self._values.extend(self._last_values[i] for i in picked)
        del self._last_steps[:], self._last_values[:]
        if len(self._steps) >= self._capacity:
            self._thin_out()

    def _thin_out(self) -> None:
        steps, values = (np.array(points).reshape(-1, 4) for points in (self._steps, self._values))
        picked = _extremes(values)
        self._steps = array("q", np.take_along_axis(steps, picked, 1).reshape(-1).tolist())
        self._values = array("d", np.take_along_axis(values, picked, 1).reshape(-1).tolist())
        self._group *= 2

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values, as copies; the latest is always among them."""
        steps, values = self._steps + self._last_steps, self._values + self._last_values
        if steps and steps[-1] != self._latest[0]:
            steps.append(self._latest[0])
            values.append(self._latest[1])
        return np.array(steps, np.int64), np.array(values, np.float64)


def _extremes(rows: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return where each row has its least and its greatest value, in their order; two different places."""
    low = rows.argmin(1)  # of a NaN, if there is one
    high = np.where(np.isnan(rows), -math.inf, rows).argmax(1)
    high = np.where(high == low, np.where(low == 0, rows.shape[1] - 1, 0), high)
    return np.sort(np.stack([low, high], 1), 1)
