"""Rows of statistics as arrays: their columns, and the merge of rows."""

import math
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import on_device
from ikkuna.numerics.statistics.moments import merge_moments

__all__ = ["COLUMN", "COLUMNS", "EMPTY", "Values", "empty_rows", "merge_rows", "repeat_rows", "row_of", "rows_of"]

Values = NDArray[np.float64]
A = TypeVar("A", Values, Tensor)

COLUMNS = (
    "n",
    "nans",
    "infs",
    "zeros",
    "l1",
    "sumsq",
    "mean",
    "m2",
    "m3",
    "m4",
    "min",
    "max",
    "finite_min",
    "finite_max",
)
"""The columns of a row, all of them float64; sums and moments are those of the finite elements.

The C++ kernels write their structure ``Record`` in this order.
"""

COLUMN = {name: i for i, name in enumerate(COLUMNS)}
"""The index of each column."""

EMPTY: Values = np.array([*[0.0] * 10, *[np.inf, -np.inf] * 2])
"""The row of no elements."""

_SUMS = COLUMNS[:6]
_MOMENTS = COLUMNS[6:10]
_EXTREMA = frozenset(COLUMNS[10:])
_REPEATED = np.array([name in _SUMS or name in ("m2", "m3", "m4") for name in COLUMNS])


def empty_rows(count: int) -> Values:
    """Return ``(count, columns)`` rows of no elements."""
    return np.tile(EMPTY, (count, 1))


def row_of(value: float, n: float = 1) -> Values:
    """Return the row of a number that occurs `n` times.

    Examples
    --------
    >>> row_of(-2.0, 3).tolist()
    [3.0, 0.0, 0.0, 0.0, 6.0, 12.0, -2.0, 0.0, 0.0, 0.0, -2.0, -2.0, -2.0, -2.0]
    """
    if not n:
        return EMPTY
    if not math.isfinite(value):
        return np.array([n, n * math.isnan(value), n * math.isinf(value), *[0.0] * 7, value, value, np.inf, -np.inf])
    return np.array([n, 0, 0, n * (value == 0), n * abs(value), n * value * value, value, 0, 0, 0, *[value] * 4])


def rows_of(values: Values) -> Values:
    """Return ``(numbers, columns)``, the row of each of several numbers.

    Examples
    --------
    >>> bool((rows_of(np.array([-2.0, 0.0]))[0] == row_of(-2.0)).all())
    True
    """
    rows = np.zeros((len(values), len(COLUMNS)))
    finite = np.isfinite(values)
    known = np.where(finite, values, 0.0)
    rows[:, COLUMN["n"]] = 1
    rows[:, COLUMN["nans"]] = np.isnan(values)
    rows[:, COLUMN["infs"]] = np.isinf(values)
    rows[:, COLUMN["zeros"]] = values == 0
    rows[:, COLUMN["l1"]] = np.abs(known)
    with np.errstate(over="ignore"):
        rows[:, COLUMN["sumsq"]] = known * known
    rows[:, COLUMN["mean"]] = known
    rows[:, COLUMN["min"]] = rows[:, COLUMN["max"]] = values
    rows[:, COLUMN["finite_min"]] = np.where(finite, values, np.inf)
    rows[:, COLUMN["finite_max"]] = np.where(finite, values, -np.inf)
    return rows


def merge_rows(values: A, columns: tuple[str, ...] = COLUMNS, counts: Any = True) -> A:
    """Return the statistics of the elements of all parts together.

    Parameters
    ----------
    values : array or Tensor
        ``(parts, ..., columns)``
    columns : tuple of str
        The columns of `values`, in the order of :data:`COLUMNS`; ``n`` is one of them.
    counts : array or Tensor
        ``(parts, ...)``, bool: whether a part counts.  A part without elements never counts.

    Returns
    -------
    array or Tensor
        ``(..., columns)``

    Examples
    --------
    >>> values = np.array([[2.0, 1.0, 2.0], [1.0, 4.0, 0.0]])                        # of 0 and 2, and of 4
    >>> merge_rows(values, ("n", "mean", "m2")).tolist()
    [3.0, 2.0, 8.0]
    """
    xp: Any = torch if isinstance(values, Tensor) else np
    found = {name: values[..., i] for i, name in enumerate(columns)}
    seen = (found["n"] > 0) & counts
    sums = [name for name in columns if name in _SUMS]  # these columns come first
    added = xp.where(seen[..., None], values[..., : len(sums)], 0.0).sum(0)
    merged = {name: added[..., i] for i, name in enumerate(sums)}
    if "mean" in found:
        finite = found["n"] - found.get("nans", 0.0) - found.get("infs", 0.0)
        moments = [found[name] for name in _MOMENTS if name in found]
        merged |= zip(_MOMENTS, merge_moments(xp.where(seen, finite, 0.0), *moments), strict=False)
    for name in found.keys() & _EXTREMA:
        pick, worst = (xp.amin, xp.inf) if name.endswith("min") else (xp.amax, -xp.inf)
        merged[name] = pick(xp.where(seen, found[name], worst), 0)
    return cast(A, xp.stack([merged[name] for name in columns], -1))


@cache
def _repeated_on(device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(_REPEATED), device)


def repeat_rows(values: A, times: Any) -> A:
    """Return the rows ``(..., columns)`` of every element repeated `times`: a mean of that many elements has this weight."""
    if isinstance(values, Tensor):
        return torch.where(_repeated_on(values.device), values * times, values)
    return np.where(_REPEATED, values * times, values)
