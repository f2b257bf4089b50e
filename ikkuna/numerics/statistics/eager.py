r"""The statistics of numbers with numpy, for machines without a C++ compiler.

A tensor is read in chunks of 131,072 elements, which stay in cache for several reductions.
Sums are dot products of pieces of 1,024 elements, too short for float32 to drift and for BLAS to start threads.  Pieces add in float64.
One ``torch.linalg.vector_norm`` over a large float32 tensor on the CPU is wrong by 0.4 % at 50 M elements; this is right to 1e-6.

Moments come from sums of powers about 0 if the mean is small beside the deviations, as for weights and gradients, otherwise about the mean.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import CHUNK, host_array
from ikkuna.numerics.statistics.record import closure
from ikkuna.numerics.statistics.table import COLUMNS, EMPTY, Values, merge_rows

__all__ = ["measure_eagerly"]

_LONG, _PIECE = 1 << 20, 1 << 10
_WIDE = frozenset((torch.float32, torch.float64))
_SQUARES = closure(("sumsq",))
_MOMENTS = frozenset(("mean", "m2", "m3", "m4"))
_EXTREMA = frozenset(("min", "max", "finite_min", "finite_max"))

_Array = NDArray[Any]
_Found = dict[str, float]

_ONES: dict[Any, _Array] = {np.dtype(name): np.ones(_PIECE, name) for name in ("float32", "float64")}
_EMPTY: _Found = dict(zip(COLUMNS, EMPTY.tolist(), strict=True))


def measure_eagerly(flat: Tensor, fields: frozenset[str]) -> Values:
    """Return the table row of a one-dimensional tensor; columns that are not in `fields` are arbitrary.

    Examples
    --------
    >>> row = measure_eagerly(torch.tensor([3.0, -4.0, 1.0]), closure(["m3", "min", "l1"]))
    >>> [row[COLUMNS.index(name)].item() for name in ("mean", "m2", "m3", "min", "l1")]
    [0.0, 26.0, -36.0, -4.0, 8.0]
    """
    if not flat.numel():
        return EMPTY.copy()
    size = _LONG if fields == _SQUARES else CHUNK  # a single reduction needs no cache
    chunks = flat.split(size) if flat.numel() > size else (flat,)
    with np.errstate(all="ignore"):
        rows = np.array([list(_measure(_as_array(chunk), fields).values()) for chunk in chunks])
        return merge_rows(rows) if len(rows) > 1 else rows[0]


def _as_array(x: Tensor) -> _Array:
    if x.dtype not in _WIDE:
        x = x.float()
    return host_array(x)


def _measure(x: _Array, fields: frozenset[str]) -> _Found:
    found = _sums(x, fields)
    if found is None and x.dtype == np.float32:
        found = _sums(x.astype(np.float64), fields)
    return _of_finite(x, fields) if found is None else found


def _sums(x: _Array, fields: frozenset[str], is_finite: bool = False) -> _Found | None:
    """Return the statistics computed in the precision of `x`; ``None`` if powers exceed it or elements may not be finite."""
    found = _EMPTY | {"n": float(len(x))}
    if not fields.isdisjoint(_EXTREMA):
        found["min"], found["max"] = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
        found["finite_min"], found["finite_max"] = found["min"], found["max"]
    if "nans" not in fields:
        return found
    squares = _dots(x, x)
    if not (is_finite or _fits(x, squares)):
        return None
    if fields & _MOMENTS and not _add_moments(found, x, squares, fields):
        return None
    if "sumsq" in fields:
        found["sumsq"] = squares
    if "l1" in fields:
        found["l1"] = _sum(np.absolute(x))
    if "zeros" in fields:
        found["zeros"] = float(len(x) - int(np.count_nonzero(np.not_equal(x, 0))))
    return found


def _fits(x: _Array, squares: float) -> bool:
    """Return whether the precision is enough for squares: they are finite, and do not vanish."""
    return math.isfinite(squares) and (x.dtype == np.float64 or squares > 1e-28 * len(x) or not x.any())


def _add_moments(found: _Found, x: _Array, squares: float, fields: frozenset[str]) -> bool:
    r"""Add the mean and moments, from sums about 0 or about the mean; return whether the precision was enough.

    With :math:`S_k = \sum_i (x_i - p)^k` about a pivot and :math:`\delta = S_1 / n` the mean is :math:`p + \delta`,
    :math:`m_2 = S_2 - n \delta^2`, :math:`m_3 = S_3 - 3 \delta S_2 + 2 n \delta^3` and
    :math:`m_4 = S_4 - 4 \delta S_3 + 6 \delta^2 S_2 - 3 n \delta^4`.
    If :math:`\delta^2` is small beside :math:`S_2 / n`, almost nothing cancels.
    """
    n, is_high = len(x), "m3" in fields
    pivot, s1, s2, s3, s4 = 0.0, _sum(x), squares, 0.0, 0.0
    if "m2" in fields:
        if n * (s1 / n) * (s1 / n) > (0.01 if is_high else 0.5) * squares or not math.isfinite(squares):
            mean = x.dtype.type(s1 / n)
            pivot, x = float(mean), x - mean
            s1, s2 = _sum(x), _dots(x, x)
        if is_high:
            powers = x * x
            s3, s4 = _dots(x, powers), _dots(powers, powers)
            if x.dtype == np.float32 and s2 and not (1e-14 * n < s2 and math.isfinite(s4)):
                return False
    d = s1 / n
    dd = d * d  # a product overflows to infinity, where ``d**2`` raises
    found["mean"] = pivot + d
    if "m2" in fields:
        found["m2"] = max(s2 - n * dd, 0.0)
    if is_high:
        found["m3"] = s3 - 3 * d * s2 + 2 * n * dd * d
    if "m4" in fields:
        found["m4"] = s4 - 4 * d * s3 + 6 * dd * s2 - 3 * n * dd * dd
    return True


def _sum(x: _Array) -> float:
    return _dots(x, _ONES[x.dtype])


def _dots(x: _Array, y: _Array) -> float:
    """Return the sum of products, in pieces; a shorter `y` is used for each piece."""
    rest = len(x) % _PIECE
    whole, is_short = len(x) - rest, len(y) < len(x)
    total = float(np.dot(x[whole:], y[:rest] if is_short else y[whole : whole + rest])) if rest else 0.0
    if whole:
        right = y if is_short else y[:whole]
        total += float(np.matmul(x[:whole].reshape(-1, 1, _PIECE), right.reshape(-1, _PIECE, 1)).sum(dtype=np.float64))
    return total


def _of_finite(x: _Array, fields: frozenset[str]) -> _Found:
    """Return the statistics of the finite elements, computed in float64, and the counts of the others."""
    finite = x[np.isfinite(x)].astype(np.float64)
    found = (_sums(finite, fields, is_finite=True) if len(finite) else None) or _EMPTY.copy()
    found["n"] = float(len(x))
    found["nans"] = float(np.count_nonzero(np.isnan(x)))
    found["infs"] = float(len(x) - len(finite)) - found["nans"]
    if "min" in fields or "max" in fields:
        found["min"], found["max"] = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
    return found
