"""Number, mean and central moments of sets of numbers."""

import triton
import triton.language as tl

__all__ = ["merge_moments", "tile_moments"]


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
