"""Triton kernels that read a tensor once and write rows of statistics, and one that merges rows.

The columns of a row are those of `ikkuna.numerics.statistics.table`, in float64.  A program reads one chunk of a tensor, tile by tile.
Powers are taken of numbers that were scaled by a power of two and centred about the mean of their own tile.  So nothing overflows,
vanishes or cancels, whatever the magnitude; tiles and rows are merged in float64 (Chan, Golub & LeVeque 1979, Pébay 2008).
Only counts of float codes use atomic operations, on integers, whose order does not matter: the same data give the same bits.
Arguments that are numbers have one type and no specialisations: Triton would compile others when they first occur, within a step.

This module needs Triton, which the CUDA and ROCm builds of torch contain.
"""

import triton
import triton.language as tl

HALF = tl.constexpr(2048)  # the number of float codes of either sign, see `ikkuna.numerics.statistics.float_code`
INFINITY = tl.constexpr(0x7F800000)  # its bits in float32; those of NaN are larger
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
def tile_moments(v, counted, k, back, LEVEL: tl.constexpr):
    """Return mean and moments of a tile of `k` finite numbers, given as scaled numbers `v` and the inverse of the scale."""
    exact = tl.sum(v.to(tl.float64)) / tl.maximum(k, 1.0)  # a float32 sum would lose a mean far below the rms
    middle = exact.to(tl.float32)
    d = tl.where(counted, v - middle, 0.0)
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
    lows,
    highs,
    zeros,
    lowest,
    highest,
    nans,
    infs,
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
    """Add one tile to the statistics so far, and unless `histogram` is negative, count its codes; see `_load_tile`.

    Each reduction over the tile costs barriers, so the extrema of finite numbers and the zeros are kept apart for each place of a tile,
    and numbers that are not finite are looked at only where there are some.  `lowest` and `highest` are those of the infinite numbers.
    """
    there, x = _load_tile(x_ptr, y_ptr, begin, stop, other, IS_FULL, OTHER, BLOCK)
    if COUNT:
        count_codes(x, there & (_spread(histogram, BLOCK) >= 0), counts_ptr)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of an element that does not exist: 0
    largest = tl.max(magnitude)
    counted, low, high, v = there, x, x, x
    if not IS_FULL:
        low, high = tl.where(there, x, float("inf")), tl.where(there, x, float("-inf"))
    bad = 0
    if largest >= INFINITY:
        is_infinite = magnitude == INFINITY
        number = tl.sum(is_infinite.to(tl.int32))
        bad = tl.sum((magnitude >= INFINITY).to(tl.int32))
        infs += number.to(tl.float64)
        nans += (bad - number).to(tl.float64)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_infinite, x, float("inf"))))
        highest = tl.maximum(highest, tl.max(tl.where(is_infinite, x, float("-inf"))))
        counted = there & (magnitude < INFINITY)
        low, high = tl.where(counted, x, float("inf")), tl.where(counted, x, float("-inf"))
        v = tl.where(counted, x, 0.0)
        largest = tl.max(tl.where(counted, magnitude, 0))
    zeros += (there & (magnitude == 0)).to(tl.int32)
    lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    scale = (tl.maximum(254 - (largest >> 23), 1) << 23).to(
        tl.float32, bitcast=True
    )  # makes the largest magnitude about 1
    back = 1.0 / scale.to(tl.float64)
    v *= scale
    k = (tl.minimum(stop - begin, BLOCK) - bad).to(tl.float64)
    l1 += tl.sum(tl.abs(v)).to(tl.float64) * back
    sumsq += tl.sum(v * v).to(tl.float64) * (back * back)
    if LEVEL > 0:
        tile_mean, t2, t3, t4 = tile_moments(v, counted, k, back, LEVEL)
        n, mean, m2, m3, m4 = merge_moments(n, mean, m2, m3, m4, k, tile_mean, t2, t3, t4)
    else:
        n += k
    return lows, highs, zeros, lowest, highest, nans, infs, l1, sumsq, n, mean, m2, m3, m4


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
    lows = tl.full((BLOCK,), float("inf"), tl.float32)
    highs = tl.full((BLOCK,), float("-inf"), tl.float32)
    zeros = tl.zeros((BLOCK,), tl.int32)
    lowest = tl.full((), float("inf"), tl.float32)
    highest = tl.full((), float("-inf"), tl.float32)
    nans, infs, l1, sumsq, n, mean, m2, m3, m4 = zero, zero, zero, zero, zero, zero, zero, zero, zero
    whole = start + (stop - start) // BLOCK * BLOCK
    for begin in range(start, whole, BLOCK):
        lows, highs, zeros, lowest, highest, nans, infs, l1, sumsq, n, mean, m2, m3, m4 = _measure_tile(
            *(x_ptr, y_ptr, counts_ptr, begin, stop, lows, highs, zeros, lowest, highest),
            *(nans, infs, l1, sumsq, n, mean, m2, m3, m4, other, histogram, True, OTHER, COUNT, LEVEL, BLOCK),
        )
    if whole < stop:
        lows, highs, zeros, lowest, highest, nans, infs, l1, sumsq, n, mean, m2, m3, m4 = _measure_tile(
            *(x_ptr, y_ptr, counts_ptr, whole, stop, lows, highs, zeros, lowest, highest),
            *(nans, infs, l1, sumsq, n, mean, m2, m3, m4, other, histogram, False, OTHER, COUNT, LEVEL, BLOCK),
        )
    finite_low, finite_high = tl.min(lows), tl.max(highs)
    unknown = nans > 0  # the extrema of numbers with a NaN are NaN
    low = tl.where(unknown, float("nan"), tl.minimum(finite_low, lowest).to(tl.float64))
    high = tl.where(unknown, float("nan"), tl.maximum(finite_high, highest).to(tl.float64))
    write_row(
        *(row_ptr, n + nans + infs, nans, infs, tl.sum(zeros).to(tl.float64), l1, sumsq, mean, m2, m3, m4),
        *(low, high, finite_low.to(tl.float64), finite_high.to(tl.float64)),
    )


WIDTH = tl.constexpr(14)  # columns of a row
CODES = tl.constexpr(4096)


@triton.jit(do_not_specialize=["n", "share", "histograms"])
def measure_one(
    x_ptr,
    n: tl.int64,
    rows_ptr,
    share: tl.int64,
    counts_ptr,
    histograms,
    COUNT: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure one contiguous tensor of `n` elements; each program reads `share` tiles of it and writes a row.

    With COUNT, it also adds their float codes to one of several histograms of the tensor.
    """
    program = tl.program_id(0)
    start = program.to(tl.int64) * share * BLOCK  # a multiple that the compiler knows, so that loads are of 16 bytes
    stop = tl.minimum(start + share * BLOCK, n)
    mine = counts_ptr + (program % histograms) * CODES
    measure_chunk(*(x_ptr, x_ptr, mine, start, stop, rows_ptr + program * WIDTH, 0, 0, 0, COUNT, LEVEL, BLOCK))


@triton.jit(do_not_specialize=["count"])
def measure_list(
    pointers_ptr,
    count,
    chunks_ptr,
    rows_ptr,
    counts_ptr,
    DTYPE: tl.constexpr,
    OTHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    COUNT: tl.constexpr,
    LEVEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure `count` contiguous tensors of one dtype, or their differences to as many others, or copy them to these.

    The tensors are given by their addresses, first those of the one list, then those of the other.
    Each program reads a chunk ``(tensor, start / BLOCK, stop, histogram)`` and writes a row; codes are counted unless
    the number of the histogram is negative.  A tensor is copied unless the other address is 0.
    """
    program = tl.program_id(0)
    chunk = chunks_ptr + program * 4
    tensor = tl.load(chunk)
    x_ptr = tl.load(pointers_ptr + tensor).to(tl.pointer_type(DTYPE))
    y_ptr = x_ptr
    other = tensor * 0
    if OTHER > 0:
        other = tl.load(pointers_ptr + count + tensor)
        y_ptr = other.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr, y_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(y_ptr, 16)
    start, stop = tl.load(chunk + 1) * BLOCK, tl.load(chunk + 2)
    histogram = tl.load(chunk + 3)
    counts_ptr += tl.maximum(histogram, 0) * CODES  # even to add nothing, the kernel needs memory that there is
    measure_chunk(
        *(x_ptr, y_ptr, counts_ptr, start, stop, rows_ptr + program * WIDTH),
        *(other, histogram, OTHER, COUNT, LEVEL, BLOCK),
    )


PARTS = tl.constexpr(65_536)  # a sample is one element out of each part
PARTS_LOG2 = tl.constexpr(16)


@triton.jit
def _mixed(h):
    """Return the finalizer of MurmurHash3 (Appleby 2011) of 32 bits."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _count_drawn(x_ptr, y_ptr, n, seed, first, counts_ptr, DIFFERENCE: tl.constexpr, BLOCK: tl.constexpr):
    """Count the codes of one element out of each of BLOCK parts of x, or of x - y; the C++ kernels draw the same."""
    i = first + tl.arange(0, BLOCK)
    wide = i.to(tl.int64)
    begin = (wide * n) >> PARTS_LOG2
    end = ((wide + 1) * n) >> PARTS_LOG2
    random = _mixed(seed + i.to(tl.uint32) * 0x9E3779B9)
    at = begin + ((random.to(tl.int64) * (end - begin)) >> 32)
    x = as_float32(tl.load(x_ptr + at))
    if DIFFERENCE:
        x = x - as_float32(tl.load(y_ptr + at))
    count_codes(x, tl.full((BLOCK,), True, tl.int1), counts_ptr)


@triton.jit(do_not_specialize=["n", "seed"])
def sample_one(x_ptr, n: tl.int64, counts_ptr, seed: tl.int64, BLOCK: tl.constexpr):
    """Count the float codes of 2**16 random elements of a contiguous tensor."""
    first = tl.program_id(0) * BLOCK
    _count_drawn(x_ptr, x_ptr, n.to(tl.int64), seed.to(tl.uint32), first, counts_ptr, False, BLOCK)


@triton.jit(do_not_specialize=["count", "seed"])
def sample_list(
    pointers_ptr,
    count,
    drawn_ptr,
    counts_ptr,
    seed: tl.int64,
    DTYPE: tl.constexpr,
    DIFFERENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the float codes of 2**16 random elements of each of some tensors ``(tensor, size, histogram)``, or of differences."""
    programs = PARTS // BLOCK
    drawn = drawn_ptr + tl.program_id(0) // programs * 3
    tensor = tl.load(drawn)
    x_ptr = tl.load(pointers_ptr + tensor).to(tl.pointer_type(DTYPE))
    y_ptr = x_ptr
    if DIFFERENCE:
        y_ptr = tl.load(pointers_ptr + count + tensor).to(tl.pointer_type(DTYPE))
    own = _mixed(seed.to(tl.uint32) + tensor.to(tl.uint32))
    first = tl.program_id(0) % programs * BLOCK
    counts = counts_ptr + tl.load(drawn + 2) * CODES
    _count_drawn(x_ptr, y_ptr, tl.load(drawn + 1), own, first, counts, DIFFERENCE, BLOCK)


@triton.jit
def merge_codes(counts_ptr, order_ptr, begin_ptr, scales_ptr, merged_ptr, BLOCK: tl.constexpr):
    """Merge the histograms of each site, scaled and rounded: those numbered order[begin[i]:begin[i + 1]] become number i."""
    blocks = CODES // BLOCK
    i = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for j in range(tl.load(begin_ptr + i), tl.load(begin_ptr + i + 1)):
        number = tl.load(order_ptr + j)
        scaled = tl.load(counts_ptr + number * CODES + at).to(tl.float64) * tl.load(scales_ptr + number)
        total += ((scaled + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)  # 2**52: ties to even
    tl.store(merged_ptr + i * CODES + at, total)


@triton.jit
def merge_rows(rows_ptr, order_ptr, begin_ptr, merged_ptr, BATCH: tl.constexpr):
    """Merge the rows of each site: those numbered order[begin[i]:begin[i + 1]] become row i."""
    i = tl.program_id(0)
    first, last = tl.load(begin_ptr + i), tl.load(begin_ptr + i + 1)
    zero = tl.zeros((), tl.float64)
    nans, infs, zeros, l1, sumsq, n, mean, m2, m3, m4 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    low = tl.full((), float("inf"), tl.float64)
    high = tl.full((), float("-inf"), tl.float64)
    finite_low, finite_high = low, high
    for begin in range(first, last, BATCH):
        at = begin + tl.arange(0, BATCH)
        there = at < last
        row = rows_ptr + tl.load(order_ptr + at, mask=there, other=0) * WIDTH
        nan = tl.load(row + 1, mask=there, other=0.0)
        inf = tl.load(row + 2, mask=there, other=0.0)
        w = tl.load(row, mask=there, other=0.0) - nan - inf
        nans += tl.sum(nan)
        infs += tl.sum(inf)
        zeros += tl.sum(tl.load(row + 3, mask=there, other=0.0))
        l1 += tl.sum(tl.load(row + 4, mask=there, other=0.0))
        sumsq += tl.sum(tl.load(row + 5, mask=there, other=0.0))
        means = tl.load(row + 6, mask=there, other=0.0)
        a2 = tl.load(row + 7, mask=there, other=0.0)
        a3 = tl.load(row + 8, mask=there, other=0.0)
        a4 = tl.load(row + 9, mask=there, other=0.0)
        lows = tl.load(row + 10, mask=there, other=float("inf"))
        highs = tl.load(row + 11, mask=there, other=float("-inf"))
        low = tl.minimum(low, tl.min(tl.where(lows == lows, lows, float("inf"))))
        high = tl.maximum(high, tl.max(tl.where(highs == highs, highs, float("-inf"))))
        finite_low = tl.minimum(finite_low, tl.min(tl.load(row + 12, mask=there, other=float("inf"))))
        finite_high = tl.maximum(finite_high, tl.max(tl.load(row + 13, mask=there, other=float("-inf"))))
        k = tl.sum(w)
        middle = tl.sum(w * means) / tl.maximum(k, 1.0)
        d = tl.where(w > 0, means - middle, 0.0)
        b2 = tl.sum(a2 + w * d * d)
        b3 = tl.sum(a3 + 3 * d * a2 + w * d * d * d)
        b4 = tl.sum(a4 + 4 * d * a3 + 6 * d * d * a2 + w * d * d * d * d)
        n, mean, m2, m3, m4 = merge_moments(n, mean, m2, m3, m4, k, middle, b2, b3, b4)
    lowest = tl.where(nans > 0, float("nan"), low)
    highest = tl.where(nans > 0, float("nan"), high)
    write_row(
        *(merged_ptr + i * WIDTH, n + nans + infs, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4),
        *(lowest, highest, finite_low, finite_high),
    )
