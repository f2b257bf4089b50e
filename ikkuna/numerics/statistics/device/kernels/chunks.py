"""Reads one chunk of a tensor once, and writes its row of statistics.

Numbers in float32, and counts of their float codes.

Number, mean and central moments of sets of numbers.
"""

import triton
import triton.language as tl

HALF = tl.constexpr(2048)  # the number of float codes of either sign, see `ikkuna.numerics.statistics.float_code`
SHIFT = tl.constexpr(20)  # a code has 3 bits of the mantissa


@triton.jit
def count_codes(x, there, counts_ptr):
    """Count the float codes of numbers; zeros are counted together, because many of them would wait for one another."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF) >> SHIFT
    code = tl.where(bits < 0, HALF - 1 - magnitude, HALF + magnitude)
    is_zero = bits == 0
    tl.atomic_add(counts_ptr + code, 1, mask=there & (bits != 0), sem="relaxed")
    tl.atomic_add(counts_ptr + HALF, tl.sum((there & is_zero).to(tl.int32)), sem="relaxed")


@triton.jit
def as_float32(x):
    """Return numbers in float32; the bits of a bfloat16 are shifted, which keeps those of a NaN."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def merge_moments(n, mean, m2, m3, m4, n_b, mean_b, m2_b, m3_b, m4_b):
    """Return number, mean and moments of two sets of numbers together."""
    total = n + n_b
    safe = tl.where(total > 0, total, 1.0)
    d = mean_b - mean
    d2 = d * d
    product = n * n_b
    new_m4 = (
        m4
        + m4_b
        + d2 * d2 * product * (n * n - product + n_b * n_b) / (safe * safe * safe)
        + 6 * d2 * (n * n * m2_b + n_b * n_b * m2) / (safe * safe)
        + 4 * d * (n * m3_b - n_b * m3) / safe
    )
    new_m3 = m3 + m3_b + d * d2 * product * (n - n_b) / (safe * safe) + 3 * d * (n * m2_b - n_b * m2) / safe
    new_m2 = m2 + m2_b + d2 * product / safe
    return total, mean + d * (n_b / safe), new_m2, new_m3, new_m4


@triton.jit
def tile_moments(v, finite, k, back, LEVEL: tl.constexpr):
    """Return mean and moments of a tile of `k` finite numbers, given as scaled numbers `v` and the inverse of the scale."""
    exact = tl.sum(v.to(tl.float64)) / tl.maximum(k, 1.0)  # a float32 sum would lose a mean far below the rms
    middle = exact.to(tl.float32)
    d = tl.where(finite, v - middle, 0.0)
    dd = d * d
    r = exact - middle.to(tl.float64)  # the mean of d
    m2 = tl.sum(dd).to(tl.float64)
    m3 = tl.zeros((), tl.float64)
    m4 = tl.zeros((), tl.float64)
    if LEVEL > 1:
        m3 = tl.sum(dd * d).to(tl.float64)
        m4 = tl.sum(dd * dd).to(tl.float64) - 4 * r * m3 + 6 * r * r * m2 - 3 * k * r * r * r * r
        m3 = m3 - 3 * r * m2 + 2 * k * r * r * r
    m2 = m2 - k * r * r
    square = back * back
    return exact * back, m2 * square, m3 * square * back, m4 * square * square


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
