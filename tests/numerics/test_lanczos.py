"""Lanczos and spectral densities on matrices with known eigenvalues."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ikkuna.numerics.curvature.lanczos import density_of, lanczos_coefficients, ritz_of

DOUBLE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def lanczos(matvec, size, steps=25, generator=None, dtype=torch.float32):
    return ritz_of(lanczos_coefficients(matvec, size, steps, generator or seeded(), dtype))


def spectral_density(matvec, size, steps=20, probes=10, generator=None, dtype=torch.float32):
    generator = generator or seeded()
    return density_of([lanczos_coefficients(matvec, size, steps, generator, dtype) for _ in range(probes)])


def symmetric(eigenvalues, seed=0):
    q = torch.linalg.qr(random(len(eigenvalues), len(eigenvalues), seed=seed))[0]
    return (q * torch.tensor(eigenvalues, dtype=DOUBLE)) @ q.T


def test_five_known_eigenvalues_are_exact_in_five_steps():
    a = symmetric([5.0, 2.0, 1.0, -3.0, 0.0])
    ritz = lanczos(lambda v: a @ v, 5, dtype=DOUBLE)
    assert np.allclose(ritz.values, [-3, 0, 1, 2, 5], atol=1e-14)
    assert ritz.bounds.max() < 1e-12
    assert ritz.weights.sum().item() == pytest.approx(1)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.integers(0, 20))
@settings(deadline=None, max_examples=60)
def test_a_full_run_finds_each_different_eigenvalue(eigenvalues, seed):
    a = symmetric(eigenvalues)
    ritz = lanczos(lambda v: a @ v, len(a), 50, seeded(seed), DOUBLE)
    assert np.isclose(ritz.values[-1], max(eigenvalues), atol=1e-6)
    assert np.isclose(ritz.values[0], min(eigenvalues), atol=1e-6)
    for value, bound in zip(ritz.values, ritz.bounds, strict=True):
        assert abs(np.array(eigenvalues) - value.item()).min() <= bound + 1e-9


def test_the_bound_holds_before_convergence():
    eigenvalues = np.linspace(-1, 3, 200) ** 3
    a = symmetric(eigenvalues.tolist())
    for steps in (2, 5, 10, 20, 40):
        ritz = lanczos(lambda v: a @ v, 200, steps, dtype=DOUBLE)
        assert len(ritz.values) == steps
        for value, bound in zip(ritz.values, ritz.bounds, strict=True):
            assert abs(eigenvalues - value.item()).min() <= bound + 1e-9
    assert ritz.values[-1].item() == pytest.approx(27, rel=1e-6)


def test_no_ghosts_appear_however_long_it_runs():
    """Without re-orthogonalisation copies of the outlier would be found."""
    a = symmetric([1000.0, *np.linspace(0, 1, 99)])
    ritz = lanczos(lambda v: a.float() @ v, 100, 60)
    assert (ritz.values > 500).sum() == 1
    assert ritz.values[-1].item() == pytest.approx(1000, rel=1e-5)


def test_a_breakdown_ends_it():
    assert lanczos(lambda v: 3 * v, 50, dtype=DOUBLE).values.tolist() == pytest.approx([3])
    assert lanczos(lambda v: 0 * v, 50).values.tolist() == [0]
    a = symmetric([2.0] * 10 + [5.0] * 10)
    assert np.allclose(lanczos(lambda v: a @ v, 20, dtype=DOUBLE).values, [2, 5])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_products_are_nan(bad):
    ritz = lanczos(lambda v: v * bad, 5)
    assert all(t.isnan().all() for t in ritz)
    density = spectral_density(lambda v: v * bad, 5)
    assert math.isnan(density.moment(1))
    assert len(density.histogram()[0]) == 0


def test_nothing_to_do():
    assert len(lanczos(lambda v: v, 0).values) == 0
    assert lanczos(lambda v: -2 * v, 1).values.tolist() == [-2]
    assert len(spectral_density(lambda v: v, 3, probes=0).nodes) == 0


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    a = spectral_density(lambda v: v, 10, generator=seeded(3))
    b = spectral_density(lambda v: v, 10, generator=seeded(3))
    assert torch.equal(a.nodes, b.nodes)
    assert torch.equal(before, torch.random.get_rng_state())


def test_moments_of_the_density_are_trace_and_norm():
    eigenvalues = np.concatenate([np.zeros(80), np.linspace(0.5, 1, 15), [5.0, 8.0, -1.0, 3.0, 4.0]])
    a = symmetric(eigenvalues.tolist())
    density = spectral_density(lambda v: a @ v, 100, steps=15, probes=60, dtype=DOUBLE)
    assert density.moment(0) == pytest.approx(1)
    assert 100 * density.moment(1) == pytest.approx(eigenvalues.sum(), rel=0.1)
    assert 100 * density.moment(2) == pytest.approx((eigenvalues**2).sum(), rel=0.15)
    shares, edges = density.histogram(9)
    assert shares.sum().item() == pytest.approx(1)
    assert (edges[0].item(), edges[-1].item()) == pytest.approx((-1, 8))
    assert shares[1].item() > 0.75  # the bulk, between 0 and 1


def test_long_vectors_in_single_precision_lose_nothing():
    diagonal = torch.rand(4_000_000, generator=torch.Generator().manual_seed(0))
    ritz = lanczos(lambda v: diagonal * v, len(diagonal), 1)
    assert ritz.values.item() == pytest.approx(diagonal.double().mean().item(), rel=2e-7)
    assert ritz.bounds.item() == pytest.approx(diagonal.double().std().item(), rel=5e-6)


def test_equal_numbers_in_single_precision_are_added_without_drift():
    """The start has entries of one size, whose sum in single precision drifts by 1e-6."""
    values = [lanczos(lambda v: 2 * v, size, 1).values.item() for size in (13_802, 14_000, 50_000, 60_000, 400_000)]
    assert values == pytest.approx([2.0] * 5, rel=2e-7)


class Passes(TorchDispatchMode):
    """Counts the times that something is taken out of a vector."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "addmv_"
        return func(*args, **(kwargs or {}))


def test_a_vector_is_orthogonalised_once_unless_little_is_left_of_it():
    with Passes() as wide:
        lanczos(lambda v: torch.linspace(0, 1, 1000) * v, 1000, 20)
    assert wide.count == 20
    with Passes() as narrow:
        lanczos(lambda v: 2 * v, 1000, 20)
    assert narrow.count == 2
