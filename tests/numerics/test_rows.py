"""Statistics of rows against scipy in float64, and against the formulas of Composer's monitor."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from ikkuna.errors import ConfigError
from ikkuna.numerics import geometry
from ikkuna.numerics.geometry import row_means, row_sums


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).exp()


def reference(x):
    x = x.double().numpy().reshape(-1, x.shape[-1])
    kurtosis = stats.kurtosis(x, axis=1, fisher=False)
    per_row = [np.linalg.norm(x, axis=1), x.mean(1), x.max(1), stats.skew(x, axis=1), kurtosis]
    return [values.mean() for values in per_row]


def composer(x):
    """Mean over rows of norm, mean, maximum and kurtosis, as the class docstring of ``ActivationMonitor`` defines them."""
    x = x.double()
    deviation = x - x.mean(-1, keepdim=True)
    kurtosis = deviation.pow(4).mean(-1) / deviation.pow(2).mean(-1).pow(2)
    return [v.mean().item() for v in (x.norm(dim=-1), x, x.amax(-1), kurtosis)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 7, 33), (9,), (3, 2, 2, 5)])
def test_averages_are_those_of_the_definition(dtype, shape):
    x = random(*shape).to(dtype)
    found = row_means(row_sums(x)).tolist()
    assert found == pytest.approx(reference(x), rel=1e-5)
    assert [found[i] for i in (0, 1, 2, 4)] == pytest.approx(composer(x), rel=1e-5)


def test_parts_give_the_same_sums(monkeypatch):
    x = random(50, 6)
    whole = row_sums(x)
    monkeypatch.setattr(geometry, "CHUNK", 20)
    torch.testing.assert_close(row_sums(x), whole)
    torch.testing.assert_close(row_sums(x[:20]) + row_sums(x[20:]), whole)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e-12])
def test_the_shape_of_rows_does_not_depend_on_their_scale(scale):
    x = random(20, 30)
    expected = row_means(row_sums(x))
    found = row_means(row_sums(x * scale))
    torch.testing.assert_close(found[3:], expected[3:], rtol=1e-4, atol=0)
    torch.testing.assert_close(found[:3] / scale, expected[:3], rtol=1e-5, atol=0)


def test_a_mean_far_above_the_spread_does_not_cancel():
    x = random(20, 300) + 1e4
    assert row_means(row_sums(x)).tolist() == pytest.approx(reference(x), rel=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_rows_have_no_shape(value, dtype):
    x = torch.full((3, 7), value, dtype=dtype)
    found = row_means(row_sums(x))
    assert found[:3].tolist() == pytest.approx([abs(x[0, 0].item()) * math.sqrt(7), x[0, 0].item(), x[0, 0].item()])
    assert found[3:].isnan().all()
    varied = torch.cat([x, random(2, 7).to(dtype)])
    assert row_means(row_sums(varied))[3:].tolist() == pytest.approx(reference(varied[3:])[3:], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_not_finite_makes_all_averages_nan(bad):
    x = random(4, 5)
    x[1, 2] = bad
    assert row_means(row_sums(x)).isnan().all()


def test_long_rows_are_summed_accurately():
    x = torch.full((1, 3_000_000), 0.1)
    x[0, ::2] = 0.3
    assert row_means(row_sums(x)).tolist() == pytest.approx(reference(x), rel=1e-5, abs=1e-5)


def test_without_rows_everything_is_undefined():
    assert row_means(row_sums(torch.zeros(0, 3))).isnan().all()
    assert row_means(row_sums(torch.zeros(3, 0))).isnan().all()
    with pytest.raises(ConfigError, match="got a number"):
        row_sums(torch.tensor(1.0))
