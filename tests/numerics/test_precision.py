"""Losses of narrower float formats against real casts, one element at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.numerics.precision import FORMATS, count_losses, shares

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_numbers_of_torch(name):
    info = torch.finfo(DTYPES[name])
    form = FORMATS[name]
    assert (form.max, form.min_normal, form.flush) == (info.max, info.tiny, info.smallest_normal * info.eps / 2)


@pytest.mark.parametrize(("name", "first"), [("fp16", 65520.0), ("e5m2", 61440.0), ("e4m3", math.nextafter(464, 500))])
def test_overflow_starts_where_rounding_leaves_the_format(name, first):
    assert FORMATS[name].overflow == first


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2"])
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_counts_are_those_of_a_cast(name, data):
    """Where a cast does not saturate it is a fair judge."""
    form = FORMATS[name]
    edge = st.sampled_from([form.flush, form.min_normal, form.overflow, form.max])
    near = st.builds(lambda e, k: float(np.nextafter(np.float32(e), np.float32(k))), edge, st.sampled_from([0, 1, 2]))
    x = data.draw(st.lists(st.one_of(st.floats(width=32), edge, near), max_size=40))
    x = torch.tensor(x, dtype=torch.float32)
    finite = x[x.isfinite()]
    cast = finite.to(DTYPES[name]).float()
    nonzero = finite != 0
    expected = [
        (nonzero & (cast == 0)).sum(),
        ((cast != 0) & (finite.abs() < form.min_normal)).sum(),
        cast.isinf().sum(),
        nonzero.sum(),
        finite.numel(),
    ]
    assert count_losses(x, name).tolist() == [int(e) for e in expected]


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2"])
def test_ties_go_where_a_cast_sends_them(name):
    form = FORMATS[name]
    ties = torch.tensor([form.flush, form.overflow])
    assert ties.to(DTYPES[name]).float().tolist() == [0.0, math.inf]
    assert count_losses(ties, name).tolist() == [1, 0, 1, 2, 2]


def test_e4m3_overflow_is_seen_although_the_cast_saturates():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 300
    assert x.to(torch.float8_e4m3fn).float().abs().max() == 448
    expected = 2 * (1 - 0.5 * (1 + math.erf(464 / 300 / math.sqrt(2))))
    assert shares(count_losses(x, "e4m3")).overflow == pytest.approx(expected, abs=4e-3)
    assert count_losses(torch.tensor([448.0, 464.0, 464.1]), "e4m3")[2] == 1


def test_small_normal_numbers_in_half_precision():
    """In fp16, 2.37 % of 1e-6 N(0, 1) vanish and 97.6 % are subnormal; fp8 keeps nothing."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) * 1e-6
    got = shares(count_losses(x, "fp16"))
    assert got.underflow == pytest.approx(0.0238, abs=5e-4)
    assert got.subnormal == pytest.approx(0.976, abs=1e-3)
    assert shares(count_losses(x, "e4m3")).underflow == 1.0
    assert shares(count_losses(x, "e5m2")).underflow > 0.99


def test_scaling_moves_the_thresholds():
    x = torch.tensor([2.0**-26, 2.0**-20])
    assert shares(count_losses(x, "fp16")).underflow == 0.5
    assert shares(count_losses(x, "fp16", scale=2.0**16)).underflow == 0.0


def test_halves_add_up_to_the_whole():
    x = torch.randn(100, generator=torch.Generator().manual_seed(1)) * 1e-7
    assert torch.equal(count_losses(x[:30], "fp16") + count_losses(x[30:], "fp16"), count_losses(x, "fp16"))


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(0),
        torch.zeros(3),
        torch.tensor(math.nan),
        torch.tensor([math.inf, -math.inf]),
        torch.empty(2, device="meta"),
        torch.tensor([1e-30], dtype=torch.float64),
        torch.ones(2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.float8_e4m3fn),
        torch.ones(1).expand(4).requires_grad_(),
    ],
)
def test_no_tensor_is_refused(x):
    numbers = torch.empty(0) if x.is_meta else x.detach().to_dense().to(torch.complex128).abs()
    finite = numbers[numbers.isfinite()]
    for name in FORMATS:
        got = shares(count_losses(x, name))
        assert math.isnan(got.underflow) == (not finite.count_nonzero())
        assert math.isnan(got.overflow) == (not finite.numel())
    assert count_losses(torch.eye(3).to_sparse(), "fp16").tolist() == [0, 0, 0, 3, 9]


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="known: fp16, bf16, e4m3, e5m2"):
        count_losses(torch.ones(1), "fp4")
