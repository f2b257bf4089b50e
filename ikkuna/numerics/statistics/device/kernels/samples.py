"""Kernels that count the float codes of samples."""

import triton
import triton.language as tl

from ikkuna.numerics.statistics.device.kernels.floats import as_float32, count_codes

__all__ = ["sample_list", "sample_one"]

CODES = tl.constexpr(4096)
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
