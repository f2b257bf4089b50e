"""Covariances that add up, and the directions they fill."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.numerics.representation import Scatter, intrinsic_dimension


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_parts_add_up_to_the_covariance_of_numpy(sizes, features):
    x = random(sum(sizes), features) + 100
    parts = [Scatter.of(p) for p in x.split(sizes)] if sum(sizes) else [Scatter.of(x)]
    whole = sum(parts[1:], parts[0])
    assert whole.n == len(x)
    if len(x):
        assert np.allclose(whole.covariance(), np.cov(x.numpy().T, ddof=0), atol=1e-9)
        assert np.allclose(whole.mean, x.mean(0))
    else:
        assert whole.covariance().isnan().all()


def test_planted_directions_are_found():
    x = random(5000, 3) @ random(3, 10, seed=1)
    c = Scatter.of(x.float()).covariance()
    assert intrinsic_dimension(c, 0.9999999) == 3
    assert intrinsic_dimension(Scatter.of(random(5000, 10)).covariance()) == 10


@pytest.mark.parametrize(
    ("eigenvalues", "k", "delve"), [([1.0] * 100, 99, 98), ([0.98, 0.015, 0.005], 2, 1), ([1.0], 1, 0)]
)
def test_the_definition_and_the_count_of_delve(eigenvalues, k, delve):
    q = torch.linalg.qr(random(len(eigenvalues), len(eigenvalues)))[0]
    c = (q * torch.tensor(eigenvalues).double()) @ q.T
    assert intrinsic_dimension(c) == k
    assert intrinsic_dimension(c, compat="delve") == delve
    assert intrinsic_dimension(1e-20 * c) == k


def delve_count(covariance, threshold=0.99):
    """Return the number of columns that delve keeps, by its steps: what it slices again after slicing has no effect."""
    values, space = torch.linalg.eigh(covariance)
    values = values.flip(0).clamp(min=0)
    shares = values.cumsum(0) / values.sum()
    space = space[:, shares < threshold]
    if space.shape[1] == 0:
        space = space[:, :1]
    elif threshold - shares[shares < threshold][-1] > 0.02:
        space = space[:, : space.shape[1] + 1]
    return space.shape[1]


@pytest.mark.fault(214)
@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize(
    "eigenvalues", [[0.9, 0.1], [0.5, 0.46, 0.04], [0.995, 0.005], [1.0, 0.0, 0.0], [1.0] * 7, [0.5, 0.4, 0.09, 0.01]]
)
def test_delve_is_counted_as_it_counts(eigenvalues, threshold):
    c = torch.diag(torch.tensor(eigenvalues).double())
    assert intrinsic_dimension(c, threshold, compat="delve") == delve_count(c, threshold)


def test_fewer_rows_than_features_limit_it():
    assert intrinsic_dimension(Scatter.of(random(5, 20)).covariance(), 1.0) <= 5


@pytest.mark.parametrize("c", [torch.zeros(3, 3), torch.empty(0, 0), torch.tensor([[1.0, math.nan], [0.0, 1.0]])])
def test_what_is_undefined_is_nan(c):
    assert math.isnan(intrinsic_dimension(c))
    assert math.isnan(intrinsic_dimension(c, compat="delve"))


def test_unsuitable_arguments_are_refused():
    for arguments in ((0.0, None), (1.1, None), (0.9, "other")):
        with pytest.raises(ConfigError, match="compat"):
            intrinsic_dimension(torch.eye(2), *arguments)


def test_constant_batches_of_different_sizes_have_no_variance():
    parts = [Scatter.of(torch.full((n, 3), 0.1, dtype=torch.float64)) for n in (7, 10, 0, 1)]
    covariance = (parts[0] + parts[1] + parts[2] + parts[3]).covariance()
    assert not covariance.any()
    assert math.isnan(intrinsic_dimension(covariance))
