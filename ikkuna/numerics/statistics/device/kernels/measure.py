"""Kernels that measure tensors, count the float codes of samples, and merge rows."""

import triton
import triton.language as tl

from ikkuna.numerics.statistics.device.kernels.chunks import (
    as_float32,
    count_codes,
    measure_chunk,
    merge_moments,
    write_row,
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
    """Measure one contiguous tensor of `n` elements; each program reads `share` of them and writes a row.

    With COUNT, it also adds their float codes to one of several histograms of the tensor.
    """
    program = tl.program_id(0)
    start = program.to(tl.int64) * share
    stop = tl.minimum(start + share, n)
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
    measure_chunk(
        *(x_ptr, y_ptr, counts_ptr + histogram * CODES, start, stop, rows_ptr + program * WIDTH),
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
