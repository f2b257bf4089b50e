r"""Rows of statistics as arrays: their columns, and the merge of rows and of central moments.

With :math:`k_r` elements of mean :math:`m_r` in part :math:`r`, :math:`m = \sum k_r m_r / \sum k_r` and :math:`d_r = m_r - m`,

.. math::
    M_2 = \sum M_{2r} + k_r d_r^2, \quad
    M_3 = \sum M_{3r} + 3 d_r M_{2r} + k_r d_r^3, \quad
    M_4 = \sum M_{4r} + 4 d_r M_{3r} + 6 d_r^2 M_{2r} + k_r d_r^4,

which is Chan, Golub & LeVeque (1979) and Pébay (2008) for any number of parts.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import on_device

A = TypeVar("A", NDArray[np.float64], Tensor)

CHUNK = 1 << 20
STATE = ("total", "squares", "center", "m2", "low", "high", "count", "nans", "above", "below")
"""The state of running moments.  Of the finite observations: sum of weights and of squared weights, mean, sum of squared deviations,
extrema and number.  Then the numbers of observations that are NaN, infinite, and negative infinite."""


def merge_moments(k: A, mean: A, m2: A | None = None, m3: A | None = None, m4: A | None = None) -> tuple[A, ...]:
    """Return the mean, and as many of the second to fourth moments as are given, of all parts together.

    Parameters
    ----------
    k : array or Tensor
        ``(parts, ...)``, how many elements each part has, or their total weight.  Other numbers of a part without elements are ignored.
    mean, m2, m3, m4 : array or Tensor
        ``(parts, ...)``, means and sums of powers of the deviations from them, in float64.

    Returns
    -------
    tuple of arrays or Tensors
        ``(...)``; 0 for no elements.

    Examples
    --------
    >>> merge_moments(np.array([2.0, 1.0]), np.array([1.0, 4.0]), np.array([2.0, 0.0]))     # of 0 and 2, and of 4
    (np.float64(2.0), np.float64(8.0))
    """
    xp: Any = torch if isinstance(k, Tensor) else np
    some, total = k > 0, k.sum(0)
    share = k / xp.where(total > 0, total, 1.0)
    about = (share * xp.where(some, mean, 0.0)).sum(0)
    center = about + (share * xp.where(some, mean - about, 0.0)).sum(0)  # the second sum rounds a small number
    d = xp.where(some, mean - center, 0.0)
    merged = [center]
    if m2 is not None:
        m2 = xp.where(some, m2, 0.0)
        merged.append((m2 + k * d * d).sum(0))
    if m2 is not None and m3 is not None:
        m3 = xp.where(some, m3, 0.0)
        merged.append((m3 + 3 * d * m2 + k * d * d * d).sum(0))
    if m2 is not None and m3 is not None and m4 is not None:
        m4 = xp.where(some, m4, 0.0)
        merged.append((m4 + 4 * d * m3 + 6 * d * d * m2 + k * d * d * d * d).sum(0))
    return tuple(merged)


def parts(x: Tensor, w: Tensor | None, per_element: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield ``(values, weights)`` with the observations along the first axis."""
    if per_element:
        yield x.unsqueeze(0), None if w is None else w.expand(x.shape).unsqueeze(0)
    elif x.numel():
        count = -(-x.numel() // CHUNK)
        values = x.reshape(-1).chunk(count)
        yield from zip(
            values, [None] * len(values) if w is None else w.expand(x.shape).reshape(-1).chunk(count), strict=True
        )


def observe(x: Tensor, w: Tensor | None) -> dict[str, Tensor]:
    """Return the state of the observations `x`: (observation, ...)."""
    finite = torch.isfinite(x)
    w = torch.ones_like(x) if w is None else w
    w = torch.where(finite, w, 0.0)
    total = w.sum(0)
    values = torch.where(finite, x, 0.0)
    center = torch.where(total > 0, (w * values).sum(0) / total, 0.0)
    deviation = torch.where(finite, x - center, 0.0)
    return {
        "total": total,
        "squares": (w * w).sum(0),
        "center": center,
        "m2": (w * deviation * deviation).sum(0),
        "low": torch.where(finite, x, torch.inf).amin(0),
        "high": torch.where(finite, x, -torch.inf).amax(0),
        "count": finite.sum(0, dtype=torch.float64),
        "nans": torch.isnan(x).sum(0, dtype=torch.float64),
        "above": torch.isposinf(x).sum(0, dtype=torch.float64),
        "below": torch.isneginf(x).sum(0, dtype=torch.float64),
    }


def combine(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the observations of `a` and `b` together, on the device of `a`."""
    b = {key: value.to(a[key].device) for key, value in b.items()}
    merged = {key: a[key] + b[key] for key in STATE}
    total, center, m2 = (torch.stack((a[key], b[key])) for key in ("total", "center", "m2"))
    merged["center"], merged["m2"] = merge_moments(total, center, m2)
    merged["low"], merged["high"] = torch.minimum(a["low"], b["low"]), torch.maximum(a["high"], b["high"])
    return merged


Values = NDArray[np.float64]

COLUMNS = (
    *("n", "nans", "infs", "zeros", "l1", "sumsq"),
    *("mean", "m2", "m3", "m4"),
    *("min", "max", "finite_min", "finite_max"),
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
