r"""Sums of powers of a host tensor's elements about 0: the fast way to the moments of what lies around 0, as weights and gradients do.

numpy does the work, chunk by chunk, in pieces too short for a float32 accumulator to drift; across pieces sums are float64.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.statistics import Record

__all__ = ["measure_around_zero"]

_CHUNK = 1 << 16  # with a buffer beside it, it stays in a core's cache
_PIECE = 1 << 10
_VANISHING = 1e-14  # mean square below which fourth powers leave float32
_NEAR = 0.01  # squared mean over mean square: what cancels is a few hundredths of what is left
_KNOWN = frozenset(("n", "mean", "m2", "m3", "m4", "min", "max", "l1", "sumsq", "nans", "infs"))

_Array = NDArray[Any]


def measure_around_zero(x: Tensor, fields: frozenset[str]) -> Record | None:
    r"""Return the `fields` of `x`, or ``None`` if this is not the way to get them.

    With :math:`S_p = \sum_i x_i^p` and :math:`\bar x = S_1 / n` it is :math:`m_2 = S_2 - \bar x S_1`,
    :math:`m_3 = S_3 - 3 \bar x S_2 + 2 \bar x^2 S_1` and :math:`m_4 = S_4 - 4 \bar x S_3 + 6 \bar x^2 S_2 - 3 \bar x^3 S_1`.
    It is the way if third or fourth moments are asked for and :math:`\bar x^2 \le S_2 / 100 n`, so that next to nothing cancels;
    if every power is finite, and none vanishes; and if `x` is one axis of float32 or float64 on the host.

    Parameters
    ----------
    x : Tensor, (n,)
        Detached.
    fields : frozenset of str
        See :func:`~ikkuna.numerics.statistics.closure`.

    Examples
    --------
    >>> record = measure_around_zero(torch.tensor([3.0, -4.0, 1.0]), frozenset(["n", "mean", "m2", "m3", "min", "nans", "infs"]))
    >>> record.mean, record.m2, record.m3, record.min
    (0.0, 26.0, -36.0, -4.0)
    >>> measure_around_zero(torch.tensor([3.0, 4.0]), frozenset(["n", "mean", "m2", "m3"])) is None
    True
    """
    if "m3" not in fields or fields - _KNOWN or not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return None
    values = x.numpy()
    buffer = np.empty(min(_CHUNK, -(-len(values) // _PIECE) * _PIECE), values.dtype)
    ones = np.ones((_PIECE, 1), values.dtype)
    low, high, sums = math.inf, -math.inf, np.zeros(5)
    with np.errstate(all="ignore"):
        for begin in range(0, len(values), _CHUNK):
            chunk = values[begin : begin + _CHUNK]
            low, high = np.minimum(low, np.minimum.reduce(chunk)), np.maximum(high, np.maximum.reduce(chunk))
            sums += _sums(_whole_pieces(chunk), buffer, ones)
            if not _is_around_zero(min(begin + _CHUNK, len(values)), sums, values.dtype):
                return None
    return _record(len(values), sums, float(low), float(high), fields)


def _whole_pieces(chunk: _Array) -> _Array:
    """Return the elements as rows of pieces, with zeros in the end, which add nothing to a sum."""
    if rest := len(chunk) % _PIECE:
        chunk = np.concatenate((chunk, np.zeros(_PIECE - rest, chunk.dtype)))
    return chunk.reshape(-1, 1, _PIECE)


def _sums(x: _Array, buffer: _Array, ones: _Array) -> _Array:
    """Return the sums of x, of its second, third and fourth powers, and of its magnitudes; `x` is (piece, 1, element)."""
    powers = buffer[: x.size].reshape(x.shape)
    across, down = powers, powers.reshape(-1, _PIECE, 1)
    s1 = np.matmul(x, ones)  # one BLAS dot for each piece, on this thread
    s2 = np.matmul(np.multiply(x, x, out=powers), ones)
    s3 = np.matmul(x, down)
    s4 = np.matmul(across, down)
    l1 = np.matmul(np.absolute(x, out=powers), ones)
    return np.array([s.sum(dtype=np.float64) for s in (s1, s2, s3, s4, l1)])


def _is_around_zero(n: int, sums: _Array, dtype: Any) -> bool:
    s1, s2, _, s4, _ = sums
    vanishes = dtype == np.float32 and s2 < _VANISHING * n
    return bool(np.isfinite(s4) and not vanishes and s1 * s1 <= _NEAR * n * s2)


def _record(n: int, sums: _Array, low: float, high: float, fields: frozenset[str]) -> Record:
    s1, s2, s3, s4, l1 = map(float, sums)
    mean = s1 / n
    record = Record(n, center=mean, m2=s2 - mean * s1, m3=s3 - 3 * mean * s2 + 2 * mean**2 * s1)
    if "m4" in fields:
        record.m4 = s4 - 4 * mean * s3 + 6 * mean**2 * s2 - 3 * mean**3 * s1
    asked = {"min": low, "max": high, "l1": l1, "sumsq": s2, "nans": 0, "infs": 0}
    for name in asked.keys() & fields:
        setattr(record, name, asked[name])
    return record
