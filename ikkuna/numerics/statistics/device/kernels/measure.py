"""Kernels that measure one tensor or a list of tensors."""

import triton
import triton.language as tl

from ikkuna.numerics.statistics.device.kernels.chunks import measure_chunk

__all__ = ["measure_list", "measure_one"]

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
