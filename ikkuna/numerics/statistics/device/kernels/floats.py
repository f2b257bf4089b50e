"""Numbers in float32, and counts of their float codes."""

import triton
import triton.language as tl

__all__ = ["as_float32", "count_codes"]

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
