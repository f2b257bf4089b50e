"""Series and their summaries against plain definitions."""

import math
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikkuna.diagnosis.history import History, Network, TimeSeries
from ikkuna.store.values import ModuleEntry

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=30)
COUNTS = st.integers(0, 12)


def series(values):
    curve = TimeSeries()
    for step, value in enumerate(values):
        curve.add(10 * step, value)
    return curve


def history(losses):
    found = History(Network())
    for step, loss in enumerate(losses):
        found.add("loss", None, step, loss)
        found.step = step
    return found


@given(VALUES, COUNTS, COUNTS)
def test_a_tail_is_a_slice(values, number, skip):
    end = max(len(values) - skip, 0)
    assert series(values).tail(number, skip) == values[max(end - number, 0) : end]


@given(VALUES, st.integers(1, 12), COUNTS)
def test_medians_leave_nan_out(values, number, skip):
    curve = series([*values, math.nan])
    known = [value for value in curve.tail(number, skip) if not math.isnan(value)]
    assert curve.median(number, skip) == pytest.approx(median(known) if known else math.nan, nan_ok=True)


def test_first_and_latest_values_are_kept():
    curve = series(map(float, range(1000)))
    assert (curve.first, curve.first_steps) == ([*map(float, range(20))], [*range(0, 200, 10)])
    assert (curve.values[0], curve.steps[0], curve.last, curve.step, curve.count) == (600, 6000, 999, 9990, 1000)
    assert curve.points(2) == ((9980, 998.0), (9990, 999.0))


def falls(losses):
    """The definition of the text, word by word."""
    recent, before, first = median(losses[-5:]), median(losses[-10:-5]), median(losses[:5])
    deviation = median(abs(loss - first) for loss in losses[:5])
    fall = first - recent
    return fall > 0.02 * abs(first) and fall > deviation and recent - before < fall / 2


@given(st.lists(st.integers(1, 40), min_size=10, max_size=16))
def test_a_loss_falls_as_the_text_says(losses):
    assert history(losses).loss_falls == falls(losses)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([5.0] * 9, None),
        ([50] * 5 + [48.9] * 5, True),
        ([50] * 5 + [49] * 5, False),  # 2 percent, and not more
        ([4, 6, 5, 3, 7, 3.9, 3.9, 3.9, 3.9, 3.9], True),
        ([4, 6, 5, 3, 7, 4, 4, 4, 4, 4], False),  # the first five deviate by 1
        ([10] * 5 + [1] * 5 + [3.9] * 5, True),
        ([10] * 5 + [1] * 5 + [4] * 5, False),  # half of the fall is undone
        # the sixth value of either end decides nothing
        ([9, 9, 9, 1, 1, 1, 5, 5, 5, 5], True),
        ([10] * 5 + [1, 1, 1, 5, 5, 5] + [6] * 5, True),
        ([5, 5, 5, 5, 5, math.nan], False),
        ([5, 5, 5, 5, 5, 4, 4, 4, 4, 4, math.inf], False),
    ],
)
def test_falling_losses(losses, expected):
    assert history(losses).loss_falls is expected


@pytest.mark.parametrize(
    ("bounds", "last", "expected"),
    [([-0.5, -0.6], 5.0, True), ([-0.5, 0.45], 5.0, False), ([-0.5, -0.6], 9.5, False), ([2.0], 5.0, False)],
)
def test_a_noisy_loss_falls_if_the_weights_have_lowered_it(bounds, last, expected):
    """The values differ from 3 to 7 between batches; 2% of 5 is 0.1."""
    known = history([4, 6, 5, 3, 7, *[last] * 5])
    for step, bound in enumerate(bounds):
        known.add("loss_change_bound", None, step, bound)
    assert known.loss_falls is expected


def test_a_run_without_losses_does_not_fall():
    assert History(Network()).loss_falls is None


def test_names_of_series_belong_to_the_longest_module():
    names = ["", "net", "net.fc", "net.lstm"]
    network = Network([ModuleEntry(name, "Linear") for name in names if name])
    found = [
        network.module(name) for name in ("net.fc", "net.fc.bias", "net.lstm:1.0", "net.lstm.weight_hh_l0", "x", None)
    ]
    assert found == ["net.fc", "net.fc", "net.lstm", "net.lstm", None, None]
    positions = [network.position(name) for name in names[1:]]
    assert all(a < b for a, b in pairwise(positions))
