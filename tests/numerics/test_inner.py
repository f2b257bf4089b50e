"""Inner products against numpy in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.numerics.geometry import dot, norm, spread_elements, squared_distance, squared_norm

PAIR = st.integers(0, 50).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=st.floats(-(2.0**100), 2.0**100, width=32))] * 2)
)


@given(PAIR)
@settings(deadline=None, max_examples=100)
def test_products_are_those_of_numpy(pair):
    a, b = (x.astype(np.float64) for x in pair)
    x, y = (torch.from_numpy(p) for p in pair)
    slack = 1e-6 * abs(a) @ abs(b) + 1e-25
    assert dot(x, y).item() == pytest.approx(a @ b, abs=slack)
    assert squared_norm(x).item() == pytest.approx(a @ a, rel=1e-6)
    assert norm(x).item() == pytest.approx(np.linalg.norm(a), rel=1e-6)
    difference = (pair[0] - pair[1]).astype(np.float64)
    assert squared_distance(x, y).item() == pytest.approx(difference @ difference, rel=1e-6)


def test_a_large_norm_is_right_where_torch_is_not():
    x = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    truth = np.linalg.norm(x.numpy().astype(np.float64))
    assert norm(x).item() == pytest.approx(truth, rel=1e-6)
    assert dot(x, -x).item() == pytest.approx(-(truth**2), rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2, torch.int32, torch.bool]
)
def test_dtypes_are_widened(dtype):
    x = (torch.ones(1000) * 300).to(dtype)
    assert squared_norm(x).item() == pytest.approx(float((x.double() ** 2).sum()))
    assert dot(x, x.clone()).item() == pytest.approx(float((x.double() ** 2).sum()))


def test_layouts_that_differ_are_aligned():
    a = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(1))
    b = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(2))
    want = float((a.double() * b.double()).sum())
    slack = 1e-7 * float(a.norm() * b.norm())  # products of either sign cancel
    assert dot(a, b.to(memory_format=torch.channels_last)).item() == pytest.approx(want, abs=slack)
    both = (t.to(memory_format=torch.channels_last) for t in (a, b))
    assert dot(*both).item() == pytest.approx(want, abs=slack)
    assert dot(a.to_sparse(), b).item() == pytest.approx(want, abs=slack)
    assert squared_distance(a[0, 0, 0, 0].expand(3), torch.zeros(3)).item() == pytest.approx(
        3 * a[0, 0, 0, 0].item() ** 2
    )


def test_edges_are_numbers_or_nan():
    assert squared_norm(torch.empty(0)).item() == 0
    assert norm(torch.tensor(-2.0)).item() == 2
    assert math.isnan(norm(torch.tensor([math.nan])).item())
    assert norm(torch.tensor([math.inf, 1.0])).item() == math.inf
    assert math.isnan(dot(torch.ones(2), torch.ones(3)).item())
    assert math.isnan(squared_distance(torch.ones(2), torch.ones(3)).item())
    assert math.isnan(norm(torch.empty(2, device="meta")).item())
    assert norm(torch.full((2,), 1e30)).item() == pytest.approx(1e30 * math.sqrt(2), rel=1e-6)
    assert norm(torch.full((2,), 1e-30)).item() == pytest.approx(1e-30 * math.sqrt(2), rel=1e-6)
    assert norm(torch.complex(torch.tensor([3.0]), torch.tensor([4.0]))).item() == 5


@pytest.mark.parametrize("shape", [(), (0,), (7, 5), (300, 500)])
def test_complex_numbers_are_pairs_of_reals(shape):
    a, b = (torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    x, y = (z.to(torch.complex128) for z in (a, b))
    assert dot(a, b).item() == pytest.approx((x.conj() * y).sum().real.item(), rel=1e-4, abs=1e-5)
    assert dot(a.conj(), b).item() == pytest.approx((x * y).sum().real.item(), rel=1e-4, abs=1e-5)
    assert squared_distance(a, b).item() == pytest.approx((x - y).abs().square().sum().item())
    assert dot(a, b.real).item() == pytest.approx((x.real * y.real).sum().item(), rel=1e-4, abs=1e-5)


def test_spread_elements_of_complex_numbers_are_pairs():
    x = torch.complex(torch.arange(12.0), -torch.arange(12.0))
    assert spread_elements(x, 5).tolist() == [[0, 0], [5, -5], [10, -10]]
