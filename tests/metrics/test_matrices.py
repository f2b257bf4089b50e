"""Metrics of singular values, against numpy in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import AlphaSubscriber, ConditionNumberSubscriber, RankSubscriber
from ikkuna.numerics.spectrum import power_law_alpha
from tests.metrics.running import watched

MATRICES = st.tuples(
    st.sampled_from([(4, 4), (3, 7), (7, 3), (5, 2, 2, 2), (1, 6), (6,), ()]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.sampled_from([1e-20, 1.0, 1e10]),
    st.integers(0, 99),
).map(lambda a: (torch.randn(a[0], generator=torch.Generator().manual_seed(a[3])) * a[2]).to(a[1]))


def sigma(x):
    matrix = x.double().numpy()
    return np.linalg.svd(matrix.reshape(len(matrix), -1) if matrix.ndim else matrix.reshape(1, 1), compute_uv=False)


@settings(deadline=None, max_examples=60)
@given(MATRICES)
def test_condition_numbers_and_ranks(x):
    s = sigma(x)
    found = watched(lambda **o: ConditionNumberSubscriber("activations", **o), x)
    assert found["activations_condition_number"] == pytest.approx([s[0] / s[-1]], rel=1e-9)
    found = watched(lambda **o: RankSubscriber("activations", **o), x)
    power, share = s**2, s / s.sum()
    [stable], [participation], [effective] = found.values()
    assert stable == pytest.approx(power.sum() / power[0], rel=1e-9)
    assert participation == pytest.approx(power.sum() ** 2 / (power**2).sum(), rel=1e-9)
    assert effective == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-9)
    assert 1 - 1e-9 <= stable <= participation + 1e-9 <= effective + 2e-9 <= len(s) + 3e-9


def test_ranks_do_not_know_scale_or_rotation():
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    found = watched(lambda **o: RankSubscriber("activations", subsample=1, **o), x, -7 * rotation @ x)
    for values in found.values():
        assert values[0] == pytest.approx(values[1])


@pytest.mark.fault(48)
@pytest.mark.parametrize(
    ("x", "condition", "stable"),
    [
        (torch.diag(torch.tensor([1.0, 2.0, 4.0])), 4.0, 21 / 16),
        (torch.ones(3, 3), math.inf, 1.0),
        (torch.zeros(3, 3), math.nan, math.nan),
        (torch.full((2, 2), math.nan), math.nan, math.nan),
        (torch.tensor([[1.0, 0.0], [math.inf, 1.0]]), math.nan, math.nan),
        (torch.eye(4).half(), 1.0, 4.0),
        (torch.tensor([[1, 0], [0, 3]]), 3.0, 10 / 9),
    ],
)
def test_known_matrices(x, condition, stable):
    found = watched(lambda **o: ConditionNumberSubscriber("activations", **o), x)
    assert found["activations_condition_number"] == pytest.approx([condition], nan_ok=True)
    found = watched(lambda **o: RankSubscriber("activations", **o), x)
    assert found["activations_stable_rank"] == pytest.approx([stable], nan_ok=True)


def test_an_empty_matrix_publishes_nothing():
    for make in (ConditionNumberSubscriber, RankSubscriber, AlphaSubscriber):
        assert not watched(lambda make=make, **o: make("activations", **o), torch.empty(0, 3))


def test_matrices_are_decomposed_every_hundredth_step_by_default():
    steps = [torch.eye(2)] * 3
    assert len(watched(lambda **o: RankSubscriber("activations", **o), *steps)["activations_stable_rank"]) == 1
    [values] = watched(lambda **o: ConditionNumberSubscriber("activations", subsample=1, **o), *steps).values()
    assert len(values) == 3


def test_alpha_of_a_planted_power_law():
    """Eigenvalues at the quantiles of a Pareto law with exponent 2.5."""
    n = 200
    eigenvalues = (1 - (np.arange(n) + 0.5) / n) ** (-1 / 1.5)
    found = watched(lambda **o: AlphaSubscriber("activations", **o), torch.diag(torch.from_numpy(eigenvalues).sqrt()))
    assert found["activations_alpha"] == pytest.approx([2.5], abs=0.06)
    assert found["activations_tail_distance"][0] < 0.02


@pytest.mark.parametrize("x", [torch.eye(5), torch.zeros(4, 4), torch.full((3, 3), math.nan), torch.ones(7)])
def test_what_has_no_tail_has_no_alpha(x):
    found = watched(lambda **o: AlphaSubscriber("activations", **o), x)
    assert all(math.isnan(v) for values in found.values() for v in values)


@pytest.mark.fault(214)
def test_alpha_is_that_of_weightwatcher_on_request():
    x = torch.randn(60, 80, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(x.double()).square()
    for compat in (None, "weightwatcher"):
        found = watched(lambda compat=compat, **o: AlphaSubscriber("activations", compat=compat, subsample=1, **o), x)
        fit = power_law_alpha(values, compat)
        assert found["activations_alpha"] == pytest.approx([fit.alpha])
        assert found["activations_tail_distance"] == pytest.approx([fit.ks_distance])
    with pytest.raises(ConfigError, match="AlphaSubscriber needs compat None or 'weightwatcher', got 'ww'"):
        AlphaSubscriber(compat="ww")
