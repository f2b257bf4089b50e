r"""Read the numbers of a tensor with numpy: the kernels that need no compiler.

A tensor is walked in chunks of 131,072 elements, which stay in cache while several reductions look at them.
Sums are dots of pieces of 1,024, too short for float32 to drift and for BLAS to start threads; across pieces they are float64.
One ``torch.linalg.vector_norm`` over a large float32 tensor on the CPU is wrong by 0.4 % at 50 M elements; this is right to 1e-6.

Moments come from sums of powers about 0 where the elements lie around it, as weights and gradients do, and otherwise about their mean.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import CHUNK
from ikkuna.numerics.statistics.record import Record, closure, merge

__all__ = ["measure_eagerly"]

_LONG, _PIECE = 1 << 20, 1 << 10
_WIDE = frozenset((torch.float32, torch.float64))
_SQUARES = closure(("sumsq",))
_MOMENTS = frozenset(("mean", "m2", "m3", "m4"))

_Array = NDArray[Any]

_ONES: dict[Any, _Array] = {np.dtype(name): np.ones(_PIECE, name) for name in ("float32", "float64")}


def measure_eagerly(flat: Tensor, fields: frozenset[str]) -> Record:
    """Return the `fields` (see :func:`~ikkuna.numerics.statistics.record.closure`) of numbers along one axis, none of them included.

    Examples
    --------
    >>> record = measure_eagerly(torch.tensor([3.0, -4.0, 1.0]), closure(["m3", "min", "l1"]))
    >>> record.mean, record.m2, record.m3, record.min, record.l1
    (0.0, 26.0, -36.0, -4.0, 8.0)
    """
    if not flat.numel():
        return _empty(fields)
    size = _LONG if fields == _SQUARES else CHUNK  # what looks once needs no cache
    chunks = flat.split(size) if flat.numel() > size else (flat,)
    return merge(*(_measure(_as_array(chunk), fields) for chunk in chunks))


def _as_array(x: Tensor) -> _Array:
    if x.dtype not in _WIDE:
        x = x.float()
    if x.is_neg() or x._is_zerotensor():
        x = x.clone()
    return x.numpy()


def _empty(fields: frozenset[str]) -> Record:
    record = Record(n=0, center=math.nan if "mean" in fields else None)
    for name in fields & {"l1", "sumsq", "zeros", "nans", "infs", "m2", "m3", "m4"}:
        setattr(record, name, 0)
    for name in fields & {"min", "max"}:
        setattr(record, name, math.nan)
    return record


def _measure(x: _Array, fields: frozenset[str]) -> Record:
    with np.errstate(all="ignore"):
        record = _look(x, fields)
        if record is None and x.dtype == np.float32:
            record = _look(x.astype(np.float64), fields)
        return _screen(x, fields) if record is None else record


def _look(x: _Array, fields: frozenset[str], is_finite: bool = False) -> Record | None:
    """Look at the numbers in their own precision; ``None`` if it has no room for their powers, or they may not all be finite."""
    record = Record(len(x))
    if "min" in fields or "max" in fields:
        record.min, record.max = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
    if "nans" not in fields:
        return record
    record.nans = record.infs = 0
    squares = _dots(x, x)
    if not (is_finite or _fits(x, squares)):
        return None
    if fields & _MOMENTS and not _add_moments(record, x, squares, fields):
        return None
    if "sumsq" in fields:
        record.sumsq = squares
    if "l1" in fields:
        record.l1 = _sum(np.absolute(x))
    if "zeros" in fields:
        record.zeros = len(x) - int(np.count_nonzero(np.not_equal(x, 0)))
    return record


def _fits(x: _Array, squares: float) -> bool:
    """Whether the precision has room for squares: they are finite, and do not vanish."""
    return math.isfinite(squares) and (x.dtype == np.float64 or squares > 1e-28 * len(x) or not x.any())


def _add_moments(record: Record, x: _Array, squares: float, fields: frozenset[str]) -> bool:
    r"""Add the mean and moments, from sums about 0 or about the mean; say whether the precision had room for them.

    With :math:`S_k = \sum_i (x_i - p)^k` about a pivot and :math:`\delta = S_1 / n` the mean is :math:`p + \delta`,
    :math:`m_2 = S_2 - n \delta^2`, :math:`m_3 = S_3 - 3 \delta S_2 + 2 n \delta^3` and
    :math:`m_4 = S_4 - 4 \delta S_3 + 6 \delta^2 S_2 - 3 n \delta^4`.
    Where :math:`\delta^2` is small beside :math:`S_2 / n` next to nothing cancels.
    """
    n, is_high = len(x), "m3" in fields
    pivot, s1, s2, s3, s4 = 0.0, _sum(x), squares, 0.0, 0.0
    if "m2" in fields:
        if n * (s1 / n) ** 2 > (0.01 if is_high else 0.5) * squares:
            mean = x.dtype.type(s1 / n)
            pivot, x = float(mean), x - mean
            s1, s2 = _sum(x), _dots(x, x)
        if is_high:
            powers = x * x
            s3, s4 = _dots(x, powers), _dots(powers, powers)
            if x.dtype == np.float32 and s2 and not (1e-14 * n < s2 and math.isfinite(s4)):
                return False
    d = s1 / n
    record.center = pivot + d
    if "m2" in fields:
        record.m2 = max(s2 - n * d * d, 0.0)
    if is_high:
        record.m3 = s3 - 3 * d * s2 + 2 * n * d**3
    if "m4" in fields:
        record.m4 = s4 - 4 * d * s3 + 6 * d * d * s2 - 3 * n * d**4
    return True


def _sum(x: _Array) -> float:
    return _dots(x, _ONES[x.dtype])


def _dots(x: _Array, y: _Array) -> float:
    """Return the sum of products, in pieces; a `y` that is shorter serves for each of them."""
    rest = len(x) % _PIECE
    whole, is_short = len(x) - rest, len(y) < len(x)
    total = float(np.dot(x[whole:], y[:rest] if is_short else y[whole : whole + rest])) if rest else 0.0
    if whole:
        right = y if is_short else y[:whole]
        total += float(np.matmul(x[:whole].reshape(-1, 1, _PIECE), right.reshape(-1, _PIECE, 1)).sum(dtype=np.float64))
    return total


def _screen(x: _Array, fields: frozenset[str]) -> Record:
    """Measure the finite elements in float64, and count the others."""
    finite = x[np.isfinite(x)].astype(np.float64)
    record = (_look(finite, fields, is_finite=True) if len(finite) else None) or _empty(fields)
    record.n = len(x)
    record.nans = int(np.count_nonzero(np.isnan(x)))
    record.infs = len(x) - len(finite) - record.nans
    if "min" in fields or "max" in fields:
        record.min, record.max = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
    return record
