"""Reduces long series to the number of points that a figure can show."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["reduced_curve", "reduced_matrix"]


def reduced_curve(
    steps: NDArray[np.int64], values: NDArray[np.float64], points: int = 400
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `points` points of a curve.

    Each part keeps its smallest and its largest value, or the first value that is not finite.

    Examples
    --------
    >>> steps, values = reduced_curve(np.arange(1000), np.sin(np.arange(1000)), 10)
    >>> len(steps), float(values.max().round(3))
    (10, 1.0)
    """
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), max(points // 2, 1) + 1).astype(int)
    begins, ends = edges[:-1, None], edges[1:, None]
    inside = np.minimum(begins + np.arange((ends - begins).max()), ends - 1)  # (parts, values of a part)
    parts = values[inside]
    is_bad = ~np.isfinite(parts)
    has_bad = is_bad.any(axis=1)
    first = np.where(has_bad, 0, np.where(is_bad, np.inf, parts).argmin(axis=1))
    second = np.where(has_bad, is_bad.argmax(axis=1), np.where(is_bad, -np.inf, parts).argmax(axis=1))
    places = np.unique(edges[:-1] + np.stack([first, second]))
    return steps[places], values[places]


def reduced_matrix(
    steps: NDArray[np.int64], values: NDArray[np.float64], present: NDArray[np.bool_], columns: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return a matrix with at most `columns` columns: means of neighbouring steps, without the missing values.

    A mean of values of which one is not finite is NaN, so that a single NaN stays visible.

    Parameters
    ----------
    steps : ndarray (steps,)
        The steps.
    values : ndarray (rows, steps)
        The values.
    present : ndarray (rows, steps)
        Which values are there.
    columns : int
        The largest number of columns.
    """
    if len(steps) <= columns:
        return steps, values, present
    edges = np.linspace(0, len(steps), columns + 1).astype(int)[:-1]
    with np.errstate(all="ignore"):
        total = np.add.reduceat(np.where(present, values, 0.0), edges, axis=1)
        count = np.add.reduceat(present.astype(np.int64), edges, axis=1)
        means = total / count
    means[~np.isfinite(means)] = np.nan
    return steps[edges], means, count > 0
