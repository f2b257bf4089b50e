"""Functions of singular values against numpy and published numbers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.spectrum import (
    condition_number,
    effective_rank,
    participation_ratio,
    power_law_alpha,
    singular_values_of_each,
    stable_rank,
)

RANKS = (stable_rank, participation_ratio, effective_rank)
MATRIX = hnp.arrays(
    np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=8), elements=st.floats(-100, 100, width=32)
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def singular_values(weight):
    return singular_values_of_each(weight.unsqueeze(0))[0]


@given(MATRIX)
@settings(deadline=None, max_examples=60)
def test_singular_values_are_those_of_numpy(w):
    got = singular_values(torch.from_numpy(w)).numpy()
    expected = np.linalg.svd(w.reshape(len(w), -1).astype(np.float64), compute_uv=False)
    assert np.allclose(got, expected, rtol=1e-9, atol=1e-12 * max(1e-30, expected[0]) + 1e-300)
    assert (np.diff(got) <= 0).all()


@given(MATRIX)
@settings(deadline=None, max_examples=60)
def test_ranks_are_ordered(w):
    sigma = singular_values(torch.from_numpy(w))
    values = [1.0, *(f(sigma).item() for f in RANKS), sigma.count_nonzero().item()]
    if sigma[0] > 0:
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values))
    else:
        assert all(math.isnan(v) for v in values[1:-1])


def test_ranks_of_known_spectra():
    assert [round(f(torch.tensor([3.0, 1.0])).item(), 3) for f in RANKS] == [1.111, 1.22, 1.755]
    assert [f(torch.full((5,), 0.3)).item() for f in RANKS] == pytest.approx([5] * 3)
    sigma = singular_values(random(50, 100))
    values = [f(sigma).item() for f in RANKS]
    reference = np.linalg.svd(random(50, 100).double().numpy(), compute_uv=False)
    p, q = reference**2 / (reference**2).sum(), reference / reference.sum()
    expected = [1 / p[0], 1 / (p**2).sum(), np.exp(-(q * np.log(q)).sum())]
    assert values == pytest.approx(expected)


def test_ranks_do_not_change_with_scale_or_rotation():
    w = random(20, 30).double()
    q = torch.linalg.qr(random(20, 20, seed=1).double())[0]
    for f in (*RANKS, condition_number):
        assert f(singular_values(1e-20 * q @ w)).item() == pytest.approx(f(singular_values(w)).item(), rel=1e-9)


def test_the_condition_number_is_that_of_numpy():
    assert condition_number(singular_values(torch.diag(torch.tensor([1.0, 2.0, 4.0])))).item() == 4
    w = random(40, 25)
    assert condition_number(singular_values(w)).item() == pytest.approx(np.linalg.cond(w.double().numpy()))
    assert condition_number(singular_values(torch.ones(3, 3))).item() == math.inf
    assert math.isnan(condition_number(singular_values(torch.zeros(3, 3))).item())
    assert condition_number(singular_values(torch.ones(1, 1))).item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_everything_nan(bad):
    """A NaN above the diagonal is not overlooked."""
    w = torch.eye(4)
    w[0, 3] = bad
    sigma = singular_values(w)
    assert sigma.isnan().all()
    for f in (*RANKS, condition_number):
        assert math.isnan(f(sigma).item())


def test_without_elements_nothing_is_defined():
    sigma = torch.empty(0, dtype=torch.float64)
    for f in (*RANKS, condition_number):
        assert math.isnan(f(sigma).item())
    assert math.isnan(power_law_alpha(sigma).alpha)


@pytest.mark.parametrize(
    "w",
    [
        torch.full((2, 2), 1e30),
        torch.full((2, 2), 1e-40),
        torch.ones(2, 2, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.int32),
        torch.ones(1).expand(2, 2),
        torch.ones(2, 2).to_sparse(),
        torch.tensor(2.0),
        torch.ones(3),
    ],
)
def test_rank_one_of_every_dtype_and_layout(w):
    sigma = singular_values(w)
    assert [f(sigma).item() for f in RANKS] == pytest.approx([1.0] * 3)
    assert sigma.count_nonzero() == 1


def test_the_exponent_of_a_pareto_sample_is_found():
    """alpha = 2.5 of 20,000 draws, within two standard errors and the fluctuation of the tail's start."""
    draws = np.random.default_rng(0).pareto(1.5, 20_000) + 1
    fit = power_law_alpha(torch.from_numpy(draws))
    assert fit.alpha == pytest.approx(2.5, abs=0.04)
    assert fit.ks_distance < 0.01
    assert fit.n_tail > 5000


def test_the_exponent_does_not_depend_on_scale():
    sigma = singular_values(random(200, 300))
    a, b = power_law_alpha(sigma**2), power_law_alpha(1e6 * sigma**2)
    assert a.alpha == pytest.approx(b.alpha, rel=1e-9)
    assert a.n_tail == b.n_tail
    assert b.x_min == pytest.approx(1e6 * a.x_min)


def test_a_heavy_tail_has_a_small_exponent_and_a_random_matrix_no_power_law():
    """The Marchenko-Pastur bulk of a Gaussian matrix is far from a power law; entries with t(2.5) tails are close."""
    assert power_law_alpha(singular_values(random(512, 512)) ** 2).ks_distance > 0.1
    heavy = np.random.default_rng(0).standard_t(2.5, (512, 512))
    fit = power_law_alpha(singular_values(torch.from_numpy(heavy)) ** 2)
    assert 2 < fit.alpha < 4
    assert fit.ks_distance < 0.1


@pytest.mark.parametrize(
    "values", [[], [1.0], [2.0, 2.0, 2.0], [0.0, 0.0], [math.nan, 1.0], [-1.0, 3.0], [math.inf, 1.0]]
)
def test_too_few_values_have_no_exponent(values):
    fit = power_law_alpha(torch.tensor(values))
    assert math.isnan(fit.alpha)
    assert math.isnan(fit.ks_distance)
    assert fit.n_tail == 0


def weightwatcher_fit(values):
    """Return alpha and D by the steps of WeightWatcher's own fit, which looks at the gaps below the law only."""
    values, found = np.sort(values), []
    for i, x_min in enumerate(values[:-1]):
        tail = values[i:]
        n = len(tail)
        alpha = 1 + n / (np.log(tail).sum() - n * np.log(x_min))
        found.append((np.abs(1 - (tail / x_min) ** (1 - alpha) - np.arange(n) / n).max(), alpha))
    return min(found)[::-1]


@pytest.mark.fault(214)
@pytest.mark.parametrize("seed", range(12))
def test_the_fit_of_weightwatcher(seed):
    generator = np.random.default_rng(seed)
    matrix = generator.standard_t(2.5, (60, 80)) if seed % 2 else generator.standard_normal((60, 80))
    values = singular_values(torch.from_numpy(matrix)) ** 2
    alpha, distance = weightwatcher_fit(values.numpy())
    fit = power_law_alpha(values, compat="weightwatcher")
    assert (fit.alpha, fit.ks_distance) == pytest.approx((alpha, distance), rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "is_normal", "expected", "of_powerlaw"),
    [
        ((64, 64), True, (3.9116, 0.1595), (3.9116, 0.1595)),
        ((64, 64), False, (4.6438, 0.1577), (5.1092, 0.1380)),
        ((256, 128), True, (4.7572, 0.1345), (14.6237, 0.1167)),
        ((256, 128), False, (6.4785, 0.1001), (6.9301, 0.0835)),
    ],
)
def test_the_table_of_fits_beside_those_of_the_package_powerlaw(shape, is_normal, expected, of_powerlaw):
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal(shape) if is_normal else generator.standard_t(3, shape)
    values = singular_values(torch.from_numpy(matrix)) ** 2
    for compat, (alpha, distance) in ((None, expected), ("weightwatcher", of_powerlaw)):
        fit = power_law_alpha(values, compat)
        assert (fit.alpha, fit.ks_distance) == pytest.approx((alpha, distance), abs=6e-5)


def test_the_two_distances_choose_other_tails():
    fits = []
    for seed in range(12):
        values = singular_values(random(60, 80, seed=seed)) ** 2
        fits.append([power_law_alpha(values, compat).alpha for compat in (None, "weightwatcher")])
    assert any(abs(one / other - 1) > 0.01 for one, other in fits)


def test_equal_eigenvalues_belong_to_one_tail():
    """A tail begins with the first of equal values."""
    values = np.repeat([1.0, 2.0, 3.0, 5.0, 9.0, 17.0, 40.0], [1, 6, 5, 4, 3, 2, 1])
    fit = power_law_alpha(torch.from_numpy(values))
    tail = values[values >= fit.x_min]
    assert fit.n_tail == len(tail)
    assert fit.alpha == pytest.approx(1 + 1 / np.mean(np.log(tail / fit.x_min)), rel=1e-9)


def test_an_unknown_compatibility_is_refused():
    with pytest.raises(ConfigError, match="compat None or 'weightwatcher', got 'ww'"):
        power_law_alpha(torch.ones(3), "ww")


def test_the_distance_is_that_of_scipy():
    from scipy import stats

    draws = np.random.default_rng(1).pareto(2.0, 300) + 1
    fit = power_law_alpha(torch.from_numpy(draws))
    tail = draws[draws >= fit.x_min]
    law = stats.pareto(fit.alpha - 1, scale=fit.x_min)
    assert fit.ks_distance == pytest.approx(stats.kstest(tail, law.cdf).statistic, rel=1e-9)
    assert fit.alpha == pytest.approx(1 + 1 / np.mean(np.log(tail / fit.x_min)), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_singular_values_of_a_complex_matrix(dtype):
    x = torch.complex(random(2, 5, 3, 2), random(2, 5, 3, 2, seed=1)).to(dtype)
    np.testing.assert_allclose(
        singular_values_of_each(x), np.linalg.svd(x.reshape(2, 5, 6).to(torch.complex128).numpy())[1], rtol=1e-6
    )
