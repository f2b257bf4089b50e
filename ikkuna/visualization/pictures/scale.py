"""Scales of pictures: when they are logarithmic, and the range that matplotlib can draw."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["bounded", "is_logarithmic"]

_LARGEST = 1e100  # the square of a limit of an axis must not overflow
_LEAST = 1e-100


def is_logarithmic(low: float, high: float) -> bool:
    """Return whether the scale of values from `low` to `high` is logarithmic.

    It is if they are positive and span more than a factor of 100.

    Examples
    --------
    >>> is_logarithmic(0.001, 1.0), is_logarithmic(0.1, 1.0), is_logarithmic(0.0, 1.0)
    (True, False, False)
    """
    return low >= _LEAST and high > 100 * low


def bounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `values`, cut to ±1e100."""
    return np.clip(values, -_LARGEST, _LARGEST)
