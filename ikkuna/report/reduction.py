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
    kept: set[int] = set()
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[begin:end]
        if not np.isfinite(part).all():
            bad = begin + int(np.argmin(np.isfinite(part)))
            kept |= {begin, bad}
        else:
            kept |= {begin + int(np.argmin(part)), begin + int(np.argmax(part))}
    places = np.array(sorted(kept))
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
