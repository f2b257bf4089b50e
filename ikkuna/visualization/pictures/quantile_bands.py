"""Quantiles over many modules as a function of the step, in bounded size."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.pictures.decimator import Decimator

__all__ = ["QuantileBands", "QuantileView"]

_CAPACITY = 256
_PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NANS = (float("nan"),) * len(_PROBABILITIES)


@dataclass(frozen=True, eq=False)
class QuantileView:
    """Minimum, quartiles and maximum over some modules.

    Parameters
    ----------
    steps : ndarray
        (point,)
    values : ndarray
        (5, point)
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class _Quantiles(NamedTuple):
    """Quantiles of `length` consecutive steps, the first of which is `step`."""

    step: int
    length: int
    values: tuple[float, ...]


class QuantileBands:
    """Keeps minimum, quartiles and maximum over all modules for each step, or for each group of steps of a long run.

    For a group of steps these are the minimum, the means of the quartiles, and the maximum.
    If one of the values of a step is NaN, all quantiles of the step are NaN: a layer that has diverged must stay visible.

    Examples
    --------
    >>> bands = QuantileBands()
    >>> bands.add(7, [4.0, 1.0, 2.0, 3.0, 5.0])
    >>> view = bands.view()
    >>> view.steps.tolist(), view.values[:, 0].tolist()
    ([7], [1.0, 2.0, 3.0, 4.0, 5.0])
    """

    def __init__(self) -> None:
        self._quantiles = Decimator(_CAPACITY, _merge)

    def add(self, step: int, values: list[float]) -> None:
        """Add the values of a step, at least one."""
        self._quantiles.add(_Quantiles(step, 1, _quantiles(values)))

    def view(self) -> QuantileView:
        """Return a copy of the quantiles."""
        entries = self._quantiles.entries()
        values = np.array([entry.values for entry in entries], np.float64).reshape(-1, len(_PROBABILITIES))
        return QuantileView(np.array([entry.step for entry in entries], np.int64), values.T)


def _quantiles(values: list[float]) -> tuple[float, ...]:
    if any(value != value for value in values):  # NaN; math.isnan() takes twice as long
        return _NANS
    ordered = sorted(values)
    return tuple(_quantile(ordered, probability) for probability in _PROBABILITIES)


def _quantile(ordered: list[float], probability: float) -> float:
    place = probability * (len(ordered) - 1)
    low = ordered[int(place)]
    high = ordered[min(int(place) + 1, len(ordered) - 1)]
    return low if low == high else low + (place - int(place)) * (high - low)


def _merge(a: _Quantiles, b: _Quantiles) -> _Quantiles:
    length = a.length + b.length
    if a.values[0] != a.values[0] or b.values[0] != b.values[0]:
        return _Quantiles(a.step, length, _NANS)
    share = b.length / length
    means = [x * (1 - share) + y * share for x, y in zip(a.values[1:-1], b.values[1:-1], strict=True)]
    return _Quantiles(a.step, length, (min(a.values[0], b.values[0]), *means, max(a.values[-1], b.values[-1])))
