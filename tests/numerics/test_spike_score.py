"""The spike score of a series: against an independent reference, on healthy losses of many kinds, and with planted spikes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikkuna.numerics.spike_score import LIMIT, SpikeScore, spike_scores

STEPS = 2_000
TIME = np.arange(STEPS)


def reference(values):
    """Return the scores, computed for each block of 16 values from all values before it."""
    values = np.asarray(values, np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    x, scores = values[finite], np.full(len(values), np.nan)
    for i in np.flatnonzero(~np.isfinite(values)):
        scores[i] = math.inf if (finite < i).any() else math.nan
    centers, residuals, farthest, ratios, usual, levels, largest, unit = [], [], [], [], [], [], 0.0, math.inf
    for begin in range(16, len(x) + 1, 16):
        window, fresh = x[max(begin - 32, 0) : begin], x[begin - 16 : begin]
        level = float(np.quantile(window, 0.5))
        known_level, *known = centers[-1] if centers else (level,)
        residuals += list(fresh - known_level)
        recent = np.array(residuals[-min(max(begin // 2, 32), 128) :])
        trend = float(np.quantile(recent, 0.5))
        middle = max(level + trend, window.min())
        levels.append(abs(middle))
        above = np.sort(recent)[len(recent) // 2 :] - trend
        deviation = max(1.4826 * float(np.quantile(above, 0.5)), max(levels[-32:]) / 2000)
        known_middle, known_deviation = known or (middle, deviation)
        largest = max(largest, np.abs(fresh - known_level).max())
        last = range(max(begin - 16, 4), begin)
        distances = [min(x[i] - known_middle, 1.5 * (x[i] - max(x[i - 4 : i]))) for i in last]
        farthest.append(min(max(distances), 10 * unit))
        if known_deviation and begin > 64:
            ratios.append(farthest[-1] / known_deviation)
            usual += [ratios[-1]] if max(distances) <= 10 * unit else []
        tail = max(max(farthest[-8:]), 0.75 * deviation * max(ratios[-256:], default=0))
        scale = max(
            deviation * max(32 / begin, 1), max(96 / begin, 1) * factor(usual[-32:], min(begin, 512)) * tail / 10
        )
        if (window == level).mean() > 0.5 or (window == min(window)).mean() > 0.25:
            scale = max(scale, largest)
        centers.append((level, middle, deviation))
        unit = scale
        for i in range(begin, min(begin + 16, len(x))):
            distance = min(x[i] - middle, 1.5 * (x[i] - x[i - 4 : i].max()))
            if unit:
                scores[finite[i]] = distance / unit
            else:
                scores[finite[i]] = math.inf if distance > 0 and begin >= 32 else min(distance, 0.0)
    return scores


def factor(ratios, values):
    """Return the factor of the tail, from the spread of the logarithms and a prior of 16 values of normal noise."""
    if len(ratios) < 2:
        return 4.0
    variance = np.var(np.log(np.clip(ratios, 0.5, None)), ddof=1)
    count = len(ratios) - 1
    index = math.sqrt(6 * (count * variance + 16 * 0.09) / (count + 16)) / math.pi
    return min(max((1e5 / values) ** index, 4.0), 16.0)


def correlated(rng, rho):
    noise, values = rng.normal(size=STEPS), np.zeros(STEPS)
    for i in range(1, STEPS):
        values[i] = rho * values[i - 1] + math.sqrt(1 - rho**2) * noise[i]
    return values


def falling(rng):
    return (0.3 + 2.3 * np.exp(-TIME / rng.uniform(20, 800))) * (1 + 0.05 * rng.normal(size=STEPS))


HEALTHY = {
    "noise": lambda rng: 1 + 0.05 * rng.normal(size=STEPS),
    "falling": falling,
    "a power of the step": lambda rng: 8 * (TIME + 10.0) ** -0.3 * (1 + 0.01 * rng.normal(size=STEPS)),
    "batch of one": lambda rng: rng.exponential(size=STEPS),
    "batch of one that is fitted": lambda rng: rng.gamma(0.1, size=STEPS),
    "squared error of one": lambda rng: rng.normal(size=STEPS) ** 2,
    "drifting": lambda rng: 1 + 0.1 * correlated(rng, 0.9),
    "drifting slowly": lambda rng: 1 + 0.1 * correlated(rng, 0.999),
    "game": lambda rng: np.exp(0.3 * correlated(rng, 0.99) + 0.1 * rng.normal(size=STEPS)),
    "reward": lambda rng: -0.01 * TIME + 2 * correlated(rng, 0.95),
    "random walk": lambda rng: np.cumsum(rng.normal(size=STEPS)),
    "mostly zero": lambda rng: np.where(
        TIME < 100, 2 - TIME / 50, (rng.random(STEPS) < 0.01) * rng.exponential(size=STEPS)
    ),
    "constant": lambda rng: np.full(STEPS, rng.uniform(-1, 1)),
    "two levels": lambda rng: np.where(rng.random(STEPS) < 0.3, 2.0, 1.0) + 0.05 * rng.normal(size=STEPS),
    "rate in steps": lambda rng: np.where(TIME < 1_000, 1.0, 0.5) + 0.03 * rng.normal(size=STEPS),
    "periodic": lambda rng: 1 + 0.3 * np.sin(TIME / 50) + 0.02 * rng.normal(size=STEPS),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_scores_equal_the_reference(kind):
    rng = np.random.default_rng(5)
    values = HEALTHY[kind](rng)[:900]
    values[[0, 300, 301]], values[600] = np.nan, -np.inf
    np.testing.assert_allclose(spike_scores(values), reference(values), rtol=1e-12, atol=1e-12)


def test_healthy_losses_have_less_than_one_spike_in_100_000_steps():
    """Also those of single samples, games and rewards; 320 curves of 2,000 steps."""
    spikes = {
        kind: sum(int((spike_scores(make(np.random.default_rng(seed))) > LIMIT).sum()) for seed in range(20))
        for kind, make in HEALTHY.items()
    }
    assert sum(spikes.values()) <= 6, spikes


@pytest.mark.parametrize("kind", ["noise", "falling", "a power of the step", "drifting", "rate in steps", "constant"])
def test_every_spike_beyond_the_limit_is_noticed_from_the_64th_step_on(kind):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        values, at = HEALTHY[kind](rng), int(rng.integers(64, STEPS))
        past = values[at - 64 : at]
        deviation = np.median(np.abs(past - np.median(past)))
        values[at] = np.median(past) + max(50 * deviation, 0.03)
        assert spike_scores(values[: at + 1])[at] > LIMIT, (kind, seed)


@pytest.mark.parametrize(("rate", "times"), [(50, 7), (100, 5), (400, 5)])
def test_a_jump_of_a_loss_that_falls_is_noticed_in_the_first_150_steps(rate, times):
    for seed in range(10):
        score, rng = SpikeScore(), np.random.default_rng(seed)
        for step, loss in enumerate((0.3 + 2 * np.exp(-TIME[:150] / rate)) * (1 + 0.03 * rng.normal(size=150))):
            assert step < 17 or score.of(times * loss) > LIMIT, (seed, step)
            score.add(loss)


def test_the_share_of_spikes_that_are_noticed_in_normal_noise():
    deviations, found = np.array([5, 8, 12, 15, 20]), np.zeros(5)
    for seed in range(200):
        rng, score = np.random.default_rng(seed), SpikeScore()
        for value in rng.normal(size=int(rng.integers(200, 800))):
            score.add(float(value))
        found += [score.of(float(deviation)) > LIMIT for deviation in deviations]
    assert (found / 200 >= [0, 0, 0.15, 0.5, 0.8]).all()
    assert found[0] == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.sampled_from([2.0**-20, 2.0, 2.0**30]))
def test_the_score_has_no_unit_and_agrees_with_the_threshold(values, unit):
    np.testing.assert_array_equal(spike_scores(np.array(values) * unit), spike_scores(values))
    score = SpikeScore()
    for value in values:
        is_above = not value <= score.threshold
        assert is_above or not score.of(value) > LIMIT
        score.add(value)


@pytest.mark.parametrize(
    ("before", "value", "expected"),
    [
        ([], 1.0, math.nan),
        ([], math.nan, math.nan),
        ([1.0], math.nan, math.inf),
        ([1.0], -math.inf, math.inf),
        ([1.0] * 15, 9.0, math.nan),
        ([2.0] * 64, 2.0, 0.0),
        ([2.0] * 64, 2.2, pytest.approx(200)),
        ([0.0] * 64, 1e-9, math.inf),
        ([0.0] * 16, 1.0, 0.0),
        ([0.0] * 32, 1.0, math.inf),
        ([1.0] + [0.0] * 64, 1.0, 1.0),
        ([math.nan] * 70, 1.0, math.nan),
    ],
)
def test_constant_and_undefined_values(before, value, expected):
    score = SpikeScore()
    for each in before:
        score.add(each)
    assert score.of(value) == pytest.approx(expected, nan_ok=True)


def test_two_early_spikes_do_not_hide_one_that_is_twenty_times_as_far():
    values = [1 + 0.01 * (i * 7 % 10) + 0.6 * (i in (20, 38)) for i in range(48)]
    score = SpikeScore()
    for value in values:
        score.add(value)
    assert score.of(1.7) < LIMIT < score.of(1 + 20 * 0.6)


def test_a_value_ten_times_as_far_as_any_before_is_a_spike_in_noise_with_a_heavy_tail():
    values = [1 + 0.01 * (i * 7 % 10) for i in range(64)]
    for i, far in zip(range(5, 64, 7), (0.4, 1.5, 0.2, 3.0, 0.3, 0.8, 2.0, 0.5, 0.6), strict=True):
        values[i] += far
    score = SpikeScore()
    for value in values:
        score.add(value)
    assert score.of(1 + 2 * 3.0) < LIMIT < score.of(1 + 11 * 3.0)


def test_a_new_level_is_a_spike_once_and_then_usual():
    rng = np.random.default_rng(0)
    values = np.concatenate([1 + 0.01 * rng.normal(size=300), 2 + 0.01 * rng.normal(size=300)])
    assert np.flatnonzero(spike_scores(values) > LIMIT).tolist() == [300]


def test_a_cleared_score_begins_anew():
    score = SpikeScore()
    first = [score.add(value) for value in range(100)]
    score.clear()
    assert [score.add(value) for value in range(100)] == pytest.approx(first, nan_ok=True)
