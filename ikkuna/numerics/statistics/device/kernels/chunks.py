"""Reads one chunk of a tensor once, and writes its row of statistics."""

import triton
import triton.language as tl

from ikkuna.numerics.statistics.device.kernels.floats import as_float32, count_codes
from ikkuna.numerics.statistics.device.kernels.moments import merge_moments, tile_moments

__all__ = ["measure_chunk", "write_row"]


@triton.jit
def _spread(number, BLOCK: tl.constexpr):
    """Return a block of equal numbers; the interpreter takes no masks that are scalars."""
    return tl.zeros((BLOCK,), tl.int64) + number


@triton.jit
def _load_tile(x_ptr, y_ptr, begin, stop, other, IS_FULL: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    """Return which elements of a tile exist, and the tile of x, or of x - y; unless `other` is 0, copy x to y."""
    at = begin + tl.arange(0, BLOCK)
    if IS_FULL:  # without a mask, so that loads are of 16 bytes
        there = tl.full((BLOCK,), True, tl.int1)
        loaded = tl.load(x_ptr + at)
    else:
        there = at < stop
        loaded = tl.load(x_ptr + at, mask=there, other=0)
    x = as_float32(loaded)
    if OTHER == 1:
        x = x - as_float32(tl.load(y_ptr + at, mask=there, other=0))
    if OTHER == 2:
        tl.store(y_ptr + at, loaded, mask=there & (_spread(other, BLOCK) != 0))
    return there, x


@triton.jit
def _measure_tile(
    x_ptr,
    y_ptr,
    counts_ptr,
    begin,
    stop,
    low,
    high,
    finite_low,
    finite_high,
    nans,
    infs,
    zeros,
    l1,
    sumsq,
    n,
    mean,
    m2,
    m3,
    m4,
    other,
    histogram,
    IS_FULL: tl.constexpr,
    OTHER: tl.constexpr,
    COUNT: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one tile to the statistics so far, and unless `histogram` is negative, count its codes; see `_load_tile`."""
    there, x = _load_tile(x_ptr, y_ptr, begin, stop, other, IS_FULL, OTHER, BLOCK)
    if COUNT:
        count_codes(x, there & (_spread(histogram, BLOCK) >= 0), counts_ptr)
    finite = there & (tl.abs(x) < float("inf"))
    known = there & (x == x)
    low = tl.minimum(low, tl.min(tl.where(known, x, float("inf"))))
    high = tl.maximum(high, tl.max(tl.where(known, x, float("-inf"))))
    finite_low = tl.minimum(finite_low, tl.min(tl.where(finite, x, float("inf"))))
    finite_high = tl.maximum(finite_high, tl.max(tl.where(finite, x, float("-inf"))))
    count = tl.sum(finite.to(tl.int32))
    seen = tl.sum(known.to(tl.int32))
    infs += (seen - count).to(tl.float64)
    nans += (tl.minimum(stop - begin, BLOCK).to(tl.int32) - seen).to(tl.float64)
    zeros += tl.sum((there & (x == 0)).to(tl.int32)).to(tl.float64)
    v = tl.where(finite, x, 0.0)
    exponent = tl.max(tl.abs(v)).to(tl.int32, bitcast=True) >> 23
    scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)  # makes the largest magnitude about 1
    back = 1.0 / scale.to(tl.float64)
    v = v * scale
    k = count.to(tl.float64)
    l1 += tl.sum(tl.abs(v)).to(tl.float64) * back
    sumsq += tl.sum(v * v).to(tl.float64) * (back * back)
    if LEVEL > 0:
        tile_mean, t2, t3, t4 = tile_moments(v, finite, k, back, LEVEL)
        n, mean, m2, m3, m4 = merge_moments(n, mean, m2, m3, m4, k, tile_mean, t2, t3, t4)
    else:
        n += k
    return low, high, finite_low, finite_high, nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4


@triton.jit
def write_row(row_ptr, n, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4, low, high, finite_low, finite_high):
    """Write the columns of a row."""
    tl.store(row_ptr + 0, n)
    tl.store(row_ptr + 1, nans)
    tl.store(row_ptr + 2, infs)
    tl.store(row_ptr + 3, zeros)
    tl.store(row_ptr + 4, l1)
    tl.store(row_ptr + 5, sumsq)
    tl.store(row_ptr + 6, mean)
    tl.store(row_ptr + 7, m2)
    tl.store(row_ptr + 8, m3)
    tl.store(row_ptr + 9, m4)
    tl.store(row_ptr + 10, low)
    tl.store(row_ptr + 11, high)
    tl.store(row_ptr + 12, finite_low)
    tl.store(row_ptr + 13, finite_high)


@triton.jit
def measure_chunk(
    x_ptr,
    y_ptr,
    counts_ptr,
    start,
    stop,
    row_ptr,
    other,
    histogram,
    OTHER: tl.constexpr,
    COUNT: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the row of x[start:stop].

    OTHER 0: y is not used, 1: the row is that of x - y, 2: x is copied to y.  LEVEL 0: no moments, 1: mean and m2, 2: all.
    """
    zero = tl.zeros((), tl.float64)
    low = tl.full((), float("inf"), tl.float32)
    high = tl.full((), float("-inf"), tl.float32)
    finite_low, finite_high = low, high
    nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    whole = start + (stop - start) // BLOCK * BLOCK
    for begin in range(start, whole, BLOCK):
        low, high, finite_low, finite_high, nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4 = _measure_tile(
            *(x_ptr, y_ptr, counts_ptr, begin, stop, low, high, finite_low, finite_high),
            *(nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4, other, histogram, True, OTHER, COUNT, LEVEL, BLOCK),
        )
    if whole < stop:
        low, high, finite_low, finite_high, nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4 = _measure_tile(
            *(x_ptr, y_ptr, counts_ptr, whole, stop, low, high, finite_low, finite_high),
            *(nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4, other, histogram, False, OTHER, COUNT, LEVEL, BLOCK),
        )
    total = n + nans + infs
    unknown = nans > 0  # the extrema of numbers with a NaN are NaN
    lowest = tl.where(unknown, float("nan"), low.to(tl.float64))
    highest = tl.where(unknown, float("nan"), high.to(tl.float64))
    write_row(
        *(row_ptr, total, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4),
        *(lowest, highest, finite_low.to(tl.float64), finite_high.to(tl.float64)),
    )
