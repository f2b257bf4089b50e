"""How far gradients agree, against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.noise import gradient_snr, sign_agreement, signs_of

GRADIENTS = hnp.arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 8)), elements=st.floats(-10, 10))


@given(GRADIENTS)
@settings(deadline=None, max_examples=40)
def test_gradient_snr_is_that_of_numpy(g):
    variance, mean = g.var(0, ddof=1), g.mean(0)
    m2 = torch.from_numpy(((g - mean) ** 2).sum(0))
    got = gradient_snr(torch.from_numpy(mean), m2, len(g)).item()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (mean**2 / (m2.numpy() / (len(g) - 1)))[m2.numpy() > 0]
    assert variance.shape == mean.shape
    assert got == pytest.approx(ratio.mean() if len(ratio) else math.nan, nan_ok=True)


def test_pure_noise_has_a_snr_of_about_one_over_k():
    g = torch.randn(10, 20_000, generator=torch.Generator().manual_seed(0))
    m2 = ((g - g.mean(0)) ** 2).sum(0)
    assert gradient_snr(g.mean(0), m2, 10).item() == pytest.approx(0.1 * 9 / 7, rel=0.05)
    assert gradient_snr(g.mean(0), m2, 10, "median").item() < 0.1
    assert math.isnan(gradient_snr(g.mean(0), m2, 1).item())
    assert math.isnan(gradient_snr(torch.empty(0), torch.empty(0), 5).item())
    assert math.isnan(gradient_snr(torch.ones(2), torch.zeros(2), 5).item())
    assert math.isnan(gradient_snr(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), 5).item())
    assert math.isnan(gradient_snr(torch.ones(2), torch.tensor([1.0, math.inf]), 5).item())
    with pytest.raises(ConfigError, match="median"):
        gradient_snr(g[0], g[0], 2, "max")


@given(GRADIENTS)
@settings(deadline=None, max_examples=40)
def test_the_agreement_of_signs_is_that_of_numpy(g):
    products = np.sign(g[0]) * np.sign(g[1])
    got = sign_agreement(signs_of(torch.from_numpy(g[0])), torch.from_numpy(g[1]))
    assert got.tolist() == [(products > 0).sum(), (products != 0).sum()]


def test_signs_of_a_tensor_with_a_nan_agree_with_nothing():
    for bad in (math.nan, math.inf):
        broken, healthy = torch.tensor([1.0, bad]), torch.ones(2)
        assert math.isnan(sign_agreement(signs_of(healthy), broken)[0].item())
        assert sign_agreement(signs_of(broken), healthy).tolist() == [0.0, 0.0]
