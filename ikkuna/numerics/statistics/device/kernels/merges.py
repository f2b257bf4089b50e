"""Kernels that merge rows and histograms."""

import triton
import triton.language as tl

from ikkuna.numerics.statistics.device.kernels.chunks import write_row
from ikkuna.numerics.statistics.device.kernels.moments import merge_moments

__all__ = ["merge_codes", "merge_rows"]

WIDTH = tl.constexpr(14)  # columns of a row
CODES = tl.constexpr(4096)


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
