"""The native counting of float codes against numpy: full counters, every code and dtype, and which elements are drawn."""

import numpy as np
import pytest
import torch

from ikkuna.numerics.statistics import native
from ikkuna.numerics.statistics.float_code import codes, sampled_codes

FULL = 4 * 65_535  # what counters of 16 bits hold before they are emptied
BITS = range(1, 8)


def counted(x: np.ndarray, m: int = 3) -> np.ndarray:
    """Count by sign and magnitude, in one table, with integers of 64 bits."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    magnitude, half = (bits & 0x7FFFFFFF) >> (23 - m), 256 << m
    return np.bincount(np.where(bits >> 31, half - 1 - magnitude, half + magnitude), minlength=2 * half)


def drawn(n: int) -> np.ndarray:
    """Return the indices of one element in each of 65,536 runs, for seed 0."""
    i = np.arange(65_536, dtype=np.uint64)
    h = (i * np.uint64(0x9E3779B9)).astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    h ^= h >> np.uint32(16)
    begin, end = i * np.uint64(n) >> np.uint64(16), (i + np.uint64(1)) * np.uint64(n) >> np.uint64(16)
    return (begin + (h.astype(np.uint64) * (end - begin) >> np.uint64(32))).astype(np.int64)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, float("inf"), float("nan")])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 70_000, FULL - 1, FULL, FULL + 1, 300_000, 3 * FULL + 7])
def test_equal_numbers_are_counted_in_one_bin(n, value):
    x = np.full(n, value, dtype=np.float32)
    assert (codes(torch.from_numpy(x)).numpy() == counted(x)).all()


@pytest.mark.parametrize("m", BITS)
@pytest.mark.parametrize("low_bits", [0, 1, -1])
def test_every_code_of_either_sign_is_counted_once(m, low_bits):
    below = low_bits & ((1 << (23 - m)) - 1)
    x = ((np.arange(512 << m, dtype=np.uint32) << np.uint32(23 - m)) | np.uint32(below)).view(np.float32)
    assert (codes(torch.from_numpy(x), m).numpy() == 1).all()


@pytest.mark.parametrize("m", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [9, 1_023, 300_001])
def test_codes_of_any_dtype_and_length_agree_with_numpy(dtype, n, m):
    x = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    x[::5] *= 1e-41  # subnormal
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-46, -1e300, 3.4e38]
    x[: len(special)] = torch.tensor(special, dtype=torch.float64)
    x = x.to(dtype)
    assert (codes(x, m).numpy() == counted(x.double().numpy(), m)).all()


def test_nine_zeros_in_ten_are_counted_as_numpy_counts_them():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_001, generator=generator) * (torch.rand(1_000_001, generator=generator) < 0.1)
    assert (codes(x).numpy() == counted(x.numpy())).all()


def test_counts_of_parts_add_up_to_those_of_the_whole():
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    parts = [codes(part) for part in x.split([1, 300_000, 400_000])]
    assert (sum(parts).numpy() == counted(x.numpy())).all()


def test_counts_overwrite_the_table():
    x, table = torch.randn(200_000), torch.full((4096,), -7)
    native.library().codes(x, 3, table)
    assert (table.numpy() == counted(x.numpy())).all()
    native.library().sampled_codes(x, 3, table, 0)
    assert table.sum() == pytest.approx(200_000, rel=1e-3)


@pytest.mark.parametrize("m", [1, 3, 7])
@pytest.mark.parametrize("n", [131_073, 262_144, 999_999, 2_500_001])
def test_a_sample_has_one_element_of_each_run_and_is_scaled_to_all(n, m):
    x = np.random.default_rng(n).standard_normal(n, dtype=np.float32)
    want = np.round(counted(x[drawn(n)], m) * (n / 65_536)).astype(np.int64)
    assert (sampled_codes(torch.from_numpy(x), m=m).numpy() == want).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [65_536, 131_072, 131_073, 2_500_001])
def test_a_sample_of_equal_numbers_stands_for_all_of_them(dtype, n):
    counts = sampled_codes(torch.full((n,), -1.0, dtype=dtype))
    assert counts[1031] == counts.sum() == n


def test_tensors_slightly_larger_than_a_sample_are_counted_completely():
    x = torch.randn(131_072, generator=torch.Generator().manual_seed(0))
    assert (sampled_codes(x).numpy() == counted(x.numpy())).all()
