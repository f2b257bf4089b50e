"""The decimator and what is built on it, for sequences of any length."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ikkuna.backends.pictures.chart import Curve, Decimator, HistogramHistory, QuantileBands, keep_first
from ikkuna.backends.pictures.heatmap import CAPACITY, Heatmap
from ikkuna.numerics.statistics.histogram import Buckets

capacities = st.sampled_from([2, 4, 6, 16])
lengths = st.integers(0, 300)
numbers = st.floats(allow_nan=False)


def filled(capacity, items, merge):
    decimator = Decimator(capacity, merge)
    for item in items:
        decimator.add(item)
    return decimator.entries()


@given(capacities, lengths)
def test_every_item_is_in_one_entry_and_the_order_stays(capacity, length):
    entries = filled(capacity, [[i] for i in range(length)], lambda a, b: a + b)
    assert [item for entry in entries for item in entry] == list(range(length))


@given(capacities, lengths)
def test_entries_are_bounded_and_equally_large(capacity, length):
    sizes = filled(capacity, [1] * length, lambda a, b: a + b)
    assert min(length, capacity // 2) <= len(sizes) <= capacity
    assert len(set(sizes[:-1])) <= 1
    assert all(size & (size - 1) == 0 for size in sizes[:-1])
    assert all(0 < sizes[-1] <= size for size in sizes[:-1])


@given(capacities, lengths)
def test_keep_first_keeps_evenly_spaced_items(capacity, length):
    kept = filled(capacity, range(length), keep_first)
    assert kept[:1] == list(range(length))[:1]
    assert len(set(np.diff(kept))) <= 1


@given(st.lists(numbers, min_size=1, max_size=300), st.sampled_from([4, 8, 16]))
def test_a_curve_keeps_ends_and_extremes_exactly_in_bounded_size(values, capacity):
    curve = Curve(capacity)
    for i, value in enumerate(values):
        curve.add(3 * i, value)
    steps, kept = curve.points()
    assert len(steps) <= capacity + 2
    assert (np.diff(steps) > 0).all()
    assert np.array_equal(kept, np.array(values)[steps // 3])
    assert (steps[0], steps[-1]) == (0, 3 * (len(values) - 1))
    assert (kept.min(), kept.max()) == (min(values), max(values))


@given(st.lists(st.floats(), max_size=16))
def test_a_curve_keeps_all_values_up_to_its_capacity(values):
    curve = Curve(16)
    for step, value in enumerate(values):
        curve.add(step, value)
    steps, kept = curve.points()
    assert steps.tolist() == list(range(len(values)))
    assert np.array_equal(kept, values, equal_nan=True)


@given(st.lists(numbers, min_size=1, max_size=100), st.sets(st.integers(0, 99), min_size=1))
def test_a_curve_with_nans_keeps_one_and_the_largest_number(values, places):
    mixed = [math.nan if i in places else value for i, value in enumerate(values)]
    curve = Curve(4)
    for step, value in enumerate(mixed):
        curve.add(step, value)
    _, kept = curve.points()
    assert np.isnan(kept).any() == any(map(math.isnan, mixed))
    if rest := [value for value in mixed if value == value]:
        assert np.nanmax(kept) == max(rest)


rows = st.lists(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5), min_size=1, max_size=700)


@given(rows)
def test_quantile_bands_have_exact_extremes_in_bounded_size(rows):
    bands = QuantileBands()
    for step, row in enumerate(rows):
        bands.add(step, row)
    view = bands.view()
    assert len(view.steps) <= 256
    assert view.steps[0] == 0
    assert (np.diff(view.steps) > 0).all()
    assert view.values[0].min() == min(map(min, rows))
    assert view.values[-1].max() == max(map(max, rows))


@pytest.mark.parametrize("count", [2, 3, 256, 257, 700])
def test_quartiles_of_a_group_are_the_means_of_those_of_its_steps(count):
    values = np.random.default_rng(0).normal(size=(count, 7))
    bands = QuantileBands()
    for step, row in enumerate(values):
        bands.add(step, row.tolist())
    view = bands.view()
    exact = np.quantile(values, [0.25, 0.5, 0.75], axis=1)
    groups = np.split(np.arange(count), view.steps[1:])
    expected = np.stack([exact[:, group].mean(1) for group in groups], 1)
    np.testing.assert_allclose(view.values[1:4], expected, rtol=1e-9)


@pytest.mark.parametrize("place", [0, 1, 300, 999])
def test_a_nan_in_a_step_is_a_nan_in_its_group_of_quantiles(place):
    bands = QuantileBands()
    for step in range(1000):
        bands.add(step, [1.0, math.nan if step == place else 2.0])
    view = bands.view()
    [bad] = np.flatnonzero(np.isnan(view.values).all(0))
    assert np.isnan(view.values).sum() == 5
    assert view.steps[bad] <= place < [*view.steps[1:], 1000][bad]


@given(lengths)
def test_histograms_are_evenly_spaced_and_end_with_the_latest(length):
    history = HistogramHistory()
    for step in range(length):
        history.add(step, Buckets(0.0, 2.0, 3, 0.0, 0.0, [1.0, 2.0], [2.0, 1.0]))
    steps = [histogram.step for histogram in history.view()]
    assert len(steps) <= 17
    assert steps[:1] == list(range(length))[:1]
    assert steps[-1:] == list(range(length))[-1:]
    assert len(set(np.diff(steps[:-1]))) <= 1


def test_empty_histograms_are_ignored():
    history = HistogramHistory()
    history.add(0, Buckets(0.0, 0.0, 0, 0.0, 0.0, [1.0], [0.0]))
    assert history.view() == []


@given(st.integers(0, 3 * CAPACITY))
@example(2 * CAPACITY)
def test_a_heat_map_holds_the_values_of_its_steps(length):
    heatmap = Heatmap()
    for step in range(length):
        heatmap.add(
            step, *((("b", "a"), np.array([step / 4, -1.0])) if step % 2 else (("a", "b"), np.array([-1.0, step / 4])))
        )
    view = heatmap.view()
    assert len(view.steps) <= CAPACITY + 1
    assert len(set(np.diff(view.steps[:-1]))) <= 1
    assert view.values.shape == view.known.shape == (len(view.names), len(view.steps))
    if length:
        assert view.values[view.names.index("b")].tolist() == [step / 4 for step in view.steps]
        assert (view.values[view.names.index("a")] == -1).all()
        assert view.known.all()
