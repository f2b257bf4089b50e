"""The gradient noise scale on gradients with a known covariance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ikkuna.errors import ConfigError
from ikkuna.numerics.noise import (
    NoiseScale,
    RunningMean,
    RunningNoise,
    gradient_snr,
    noise_scale,
    pairwise_noise_scale,
)

GRADIENTS = hnp.arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 8)), elements=st.floats(-10, 10))


def simulate(steps, count, size, seed=0):
    """Squares of micro-batch means of a gradient with |G|^2 = 1 and tr Sigma = 330 over 140 dimensions."""
    rng = np.random.default_rng(seed)
    g = 140**-0.5 + math.sqrt(330 / 140 / size) * rng.standard_normal((steps, count, 140))
    return (g**2).sum(-1), (g.mean(1) ** 2).sum(-1)


def of_micro_batches(squares, mean_square, size):
    """The estimate from all pairs of micro-batches."""
    count = len(squares)
    mean = sum(squares) / count
    return pairwise_noise_scale(mean, (count * mean_square - mean) / (count - 1), size)


def estimates(steps, count, size):
    return [of_micro_batches(list(s), b, size) for s, b in zip(*simulate(steps, count, size), strict=True)]


@pytest.mark.parametrize(("count", "size"), [(2, 16), (8, 16), (32, 16), (2, 256)])
def test_both_terms_are_unbiased_and_are_divided_last(count, size):
    found = estimates(4000, count, size)
    trace, grad_sq = (np.mean([getattr(f, name) for f in found]) for name in ("trace", "grad_sq"))
    assert trace / grad_sq == pytest.approx(330, rel=0.1)
    assert trace == pytest.approx(330, rel=0.02)
    assert grad_sq == pytest.approx(1, abs=0.1)


def test_ratios_of_single_steps_are_far_off():
    """The reason for averaging terms first: of two micro-batches of 16 the median ratio is 121 for a true 330."""
    found = estimates(4000, 2, 16)
    assert np.median([f.trace / f.grad_sq for f in found]) < 165
    assert np.mean([math.isnan(f.noise_scale) for f in found]) == pytest.approx(0.3, abs=0.03)


def test_a_running_noise_scale_finds_the_true_one():
    running = RunningNoise(0.999)
    for estimate in estimates(4000, 8, 16):
        running.update(estimate)
    assert running.value.noise_scale == pytest.approx(330, rel=0.12)


@given(GRADIENTS, st.integers(1, 64))
@settings(deadline=None, max_examples=60)
def test_terms_are_the_sample_covariance_and_the_mean_product(g, size):
    count = len(g)
    found = of_micro_batches(list((g**2).sum(1)), float((g.mean(0) ** 2).sum()), size)
    assert found.trace == pytest.approx(size * g.var(0, ddof=1).sum(), abs=1e-9 * size)
    products = g @ g.T
    expected = (products.sum() - np.trace(products)) / (count * (count - 1))
    assert found.grad_sq == pytest.approx(expected, abs=1e-9)
    two = noise_scale(float((g**2).sum(1).mean()), float((g.mean(0) ** 2).sum()), size, count * size)
    assert found.trace == pytest.approx(two.trace, abs=1e-8 * size)
    assert found.grad_sq == pytest.approx(two.grad_sq, abs=1e-8)


def test_identical_micro_batches_have_no_noise():
    found = of_micro_batches([4.0, 4.0, 4.0], 4.0, 8)
    assert (found.trace, found.grad_sq, found.noise_scale) == (0, 4, 0)


def undefined(found):
    return all(math.isnan(value) for value in (found.trace, found.grad_sq, found.noise_scale))


@pytest.mark.parametrize(
    "arguments",
    [(math.nan, 1.0, 1, 2), (1.0, math.inf, 1, 2), (1.0, 1.0, 2, 2), (1.0, 1.0, 0, 2), (1.0, 1.0, 1, -3)],
)
def test_undefined_noise_is_nan(arguments):
    assert undefined(noise_scale(*arguments))


def test_pairs_without_a_size_and_a_lost_gradient():
    assert undefined(pairwise_noise_scale(1.0, 1.0, 0))
    assert undefined(pairwise_noise_scale(math.nan, 1.0, 4))
    lost = noise_scale(10.0, 1.0, 1, 2)
    assert lost.grad_sq < 0
    assert math.isnan(lost.noise_scale)


def test_a_running_mean_has_no_bias_and_skips_nan():
    mean = RunningMean(0.99)
    assert math.isnan(mean.value)
    for x in (7.0, math.nan, 7.0, math.inf, 7.0):
        mean.update(x)
    assert mean.value == pytest.approx(7)
    assert mean.skipped == 2
    weights = 0.9 ** np.arange(4, -1, -1)
    xs = np.array([1.0, 5.0, -2.0, 8.0, 3.0])
    other = RunningMean(0.9)
    for x in xs:
        other.update(x)
    assert other.value == pytest.approx(weights @ xs / weights.sum())
    for beta in (1.0, -0.1, math.nan):
        with pytest.raises(ConfigError, match="beta"):
            RunningMean(beta)


def test_a_broken_step_is_left_out_of_the_running_noise():
    running = RunningNoise(0.9)
    running.update(NoiseScale(grad_sq=1.0, trace=2.0))
    running.update(NoiseScale(math.nan, math.nan))
    running.update(NoiseScale(grad_sq=5.0, trace=math.nan))
    found = running.value
    assert (found.trace, found.grad_sq, found.noise_scale) == pytest.approx((2.0, 1.0, 2.0))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_median_of_the_ratios_is_that_of_numpy(count):
    mean, m2 = torch.arange(1.0, count + 1) ** 2, torch.ones(count)
    m2[:1] = 0.0 if count > 4 else 1.0  # which has no ratio
    ratio = mean.double().square() / (m2.double() / 2)
    expected = np.median(ratio[ratio.isfinite()].numpy())
    assert gradient_snr(mean, m2, count=3, reduction="median").item() == pytest.approx(expected)
