"""Canonical correlations against covariances, published numbers and simulated chance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.numerics.representation import chance_level, principal_basis, svcca


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def canonical_correlations(x, y):
    """All correlations, of which `svcca` returns the mean."""
    rho = np.linalg.svd(principal_basis(x, 1.0).T @ principal_basis(y, 1.0), compute_uv=False)
    assert svcca(principal_basis(x, 1.0), principal_basis(y, 1.0)) == pytest.approx(rho.mean())
    return torch.from_numpy(rho)


def notebook():
    """The data of the notebook that accompanies Kornblith et al. (2019)."""
    rng = np.random.RandomState(1337)
    x = rng.randn(100, 10)
    return torch.from_numpy(x), torch.from_numpy(rng.randn(100, 10) + x)


def reference(x, y):
    """The roots of the eigenvalues of Sxx^-1 Sxy Syy^-1 Syx."""
    x, y = (a - a.mean(0) for a in (x.numpy(), y.numpy()))
    m = np.linalg.solve(x.T @ x, x.T @ y) @ np.linalg.solve(y.T @ y, y.T @ x)
    return np.sqrt(np.sort(np.linalg.eigvals(m).real)[::-1].clip(0, 1))


def test_the_numbers_of_the_notebook():
    x, y = notebook()
    rho = canonical_correlations(x, y)
    assert rho.square().mean().item() == pytest.approx(0.54540, abs=5e-6)
    assert rho.mean().item() == pytest.approx(0.73101, abs=5e-6)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 50))
@settings(deadline=None, max_examples=40)
def test_correlations_are_those_of_the_covariances(p, q, seed):
    x, y = random(40, p, seed=seed), random(40, q, seed=seed + 1)
    got = canonical_correlations(x, y).numpy()
    assert len(got) == min(p, q)
    assert np.allclose(got, reference(x, y)[: len(got)], atol=1e-6)


def test_rank_deficient_data_is_exactly_like_itself():
    x = random(100, 20)
    x = torch.cat([x, x[:, :5], torch.zeros(100, 3, dtype=torch.float64), x[:, :1] * 3 + x[:, 1:2]], 1)
    rho = canonical_correlations(x, x)
    assert len(rho) == 20
    assert rho.min().item() == pytest.approx(1, abs=1e-12)
    assert svcca(principal_basis(x), principal_basis(x)) == pytest.approx(1, abs=1e-12)


def test_any_invertible_map_leaves_them():
    x, y = random(80, 6), random(80, 6) + random(80, 6, seed=1)
    a, b = random(6, 6, seed=2), random(6, 6, seed=3)
    expected = canonical_correlations(x, y)
    assert torch.allclose(canonical_correlations(1e-5 * x @ a + 7, y @ b), expected)
    assert torch.allclose(canonical_correlations(y, x), expected)


def test_svcca_keeps_a_share_of_variance_not_of_singular_values():
    q = torch.linalg.qr(random(200, 20) - random(200, 20).mean(0))[0]
    x = (q - q.mean(0)) * torch.logspace(0, -2, 20).double()
    values = np.linalg.svd((x - x.mean(0)).numpy(), compute_uv=False)
    by_variance = int(np.searchsorted(np.cumsum(values**2) / (values**2).sum(), 0.99)) + 1
    by_values = int(np.searchsorted(np.cumsum(values) / values.sum(), 0.99)) + 1
    basis = principal_basis(x)
    assert basis.shape[1] == by_variance < by_values
    assert svcca(basis, principal_basis(x + 1e-3 * random(200, 20, seed=5))) > 0.9
    assert principal_basis(x, variance=1.0).shape[1] == 20


def test_the_published_chance_level():
    """One published draw gave 0.1906, another 0.1905; the law says 0.1908."""
    assert chance_level(500, 500, 10_000) == pytest.approx(0.1905, abs=5e-4)


@pytest.mark.parametrize(("p", "q", "n"), [(20, 50, 300), (50, 20, 300), (40, 40, 80), (60, 70, 100), (5, 5, 500)])
def test_chance_is_what_independent_data_shows(p, q, n):
    rho = [canonical_correlations(random(n, p, seed=s), random(n, q, seed=s + 100)).numpy() for s in range(20)]
    assert np.mean(rho) == pytest.approx(chance_level(p, q, n), rel=0.04)


@pytest.mark.parametrize(("d", "n", "mean"), [(100, 1000, 0.27), (100, 200, 0.6377)])
def test_chance_at_the_rules_of_thumb(d, n, mean):
    assert chance_level(d, d, n) == pytest.approx(mean, abs=0.01)


def test_chance_at_the_edges():
    assert chance_level(10, 3, 11) == 1
    assert math.isnan(chance_level(0, 3, 11))
    assert math.isnan(chance_level(2, 3, 1))
    assert chance_level(1, 1, 1000) == pytest.approx(0.02, abs=0.01)


def test_fewer_rows_than_features_are_all_alike():
    x, y = (principal_basis(random(10, 30, seed=seed), 1.0) for seed in (0, 1))
    assert svcca(x, y) == pytest.approx(1)
    assert chance_level(x.shape[1], y.shape[1], 10) == 1


@pytest.mark.parametrize(
    "x", [torch.ones(9, 3), torch.full((9, 2), math.nan), torch.full((9, 2), math.inf), torch.empty(9, 0)]
)
def test_what_is_undefined_is_nan(x):
    x, y = principal_basis(x), principal_basis(random(9, 2))
    assert math.isnan(svcca(x, y))
    assert math.isnan(svcca(y, x))
    empty = principal_basis(torch.empty(0, 2))
    assert math.isnan(svcca(empty, empty))


def test_unsuitable_arguments_are_refused():
    with pytest.raises(ConfigError, match="equal numbers of rows"):
        svcca(random(5, 2), random(6, 2))
    with pytest.raises(ConfigError, match="variance in"):
        principal_basis(random(5, 2), variance=0)


def test_constant_rows_have_no_directions():
    assert principal_basis(torch.full((7, 3), 0.1, dtype=torch.float64)).shape == (7, 0)
