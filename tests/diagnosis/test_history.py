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
    [
        ([-0.5, -0.6], [5.0] * 5, True),
        ([-0.5, 0.45], [5.0] * 5, False),
        ([2.0], [5.0] * 5, False),
        ([-0.15], [5.0] * 5, True),
        ([-0.1], [5.0] * 5, False),
        ([-0.5, -0.6], [9.0] * 5, True),
        ([-0.5, -0.6], [8.9, 8.9, 9.1, 20.0, 20.0], False),
        ([-0.5, -0.6], [9.5] * 5, False),
    ],
)
def test_a_noisy_loss_falls_if_the_weights_have_lowered_it(bounds, last, expected):
    """The values differ from 3 to 7 between batches; 2% of 5 is 0.1."""
    known = history([4, 6, 5, 3, 7, *last])
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


def test_modules_are_described_and_what_is_unknown_has_neutral_values():
    entries = [
        ModuleEntry("conv", "Conv2d", (("weight", (4, 3, 2)), ("bias", (4,)), ("late", None))),
        ModuleEntry("norm", "BatchNorm2d", (("weight", (4,)),)),
        ModuleEntry("fc", "Linear", (("weight", (2, 4)),)),
    ]
    network = Network(entries)
    described = [
        (
            *(network.position(name), network.entry(name), network.class_of(name), network.shape_of(name)),
            *(network.size_of(name), network.is_matrix(name), network.is_normalised(name)),
        )
        for name in ("conv", "conv.bias", "conv.late", "norm", "fc", "fc:1.0", "other")
    ]
    conv, norm, fc = entries
    assert described == [
        (0, conv, "Conv2d", (4, 3, 2), 24, True, True),
        (0, conv, "Conv2d", (4,), 4, False, True),
        (0, conv, "Conv2d", None, 1, True, True),
        (1, norm, "BatchNorm2d", (4,), 4, False, False),
        (2, fc, "Linear", (2, 4), 8, True, False),
        (2, fc, "Linear", None, 1, True, False),
        (3, None, "", None, 1, True, False),
    ]
    assert (network.named("Linear", "Conv2d"), network.named("ReLU"), Network().position("a")) == (
        ("conv", "fc"),
        (),
        0,
    )


def test_series_are_those_of_their_kind_and_pass_in_the_order_of_the_network():
    known = History(
        Network([ModuleEntry("b", "Linear", (("weight", (2, 2)), ("bias", (2,)))), ModuleEntry("a", "ReLU")])
    )
    assert (known.begin, known.is_complete, known.step, known.curve("x"), known.now("x")) == (
        None,
        False,
        -1,
        None,
        None,
    )
    assert (known.curves("x"), known.fresh("x"), known.matrices("x"), [*known.all_curves()]) == ({}, [], [], [])
    known.add_all("x", ("a", "b.bias"), 5, (1.0, 2.0))
    assert [name for name, _ in known.matrices("x")] == ["a"]
    known.add_all("x", ("b", "unknown", "a"), 7, (3.0, 4.0, 5.0))
    known.add("x", None, 3, 6.0, "testing")
    assert (known.begin, known.is_complete, known.step) == (5, False, 7)
    found = [
        (kind, pass_name, name, [*curve.values], [*curve.steps]) for kind, pass_name, name, curve in known.all_curves()
    ]
    assert found == [
        ("x", "training", "b", [3.0], [7]),
        ("x", "training", "b.bias", [2.0], [5]),
        ("x", "training", "a", [1.0, 5.0], [5, 7]),
        ("x", "training", "unknown", [4.0], [7]),
        ("x", "testing", None, [6.0], [3]),
    ]
    assert [name for name, _ in known.fresh("x")] == ["b", "a", "unknown"]
    known.add("x", "b.bias", 7, 7.0)
    assert [name for name, _ in known.fresh("x")] == ["b", "b.bias", "a", "unknown"]
    assert [name for name, _ in known.matrices("x")] == ["b", "a", "unknown"]
    assert known.now("x") is known.curve("x") is known.curves("x")["b"]
    assert (known.now("x", "testing"), known.curve("x", "testing").last) == (None, 6.0)
    known.step = 8
    assert (known.now("x"), known.fresh("x"), known.matrices("x")) == (None, [], [])
    with pytest.raises(ValueError, match="zip"):
        known.add_all("x", ("a", "b"), 8, (1.0,))
    known.memory["rule"]["seen"] = 1
    known.scored["loss"].add((0,), (1.0,))
    known.clear()
    assert (known.begin, known.step, known.memory, [*known.all_curves()], [*known.scored["loss"].latest]) == (
        None,
        -1,
        {},
        [],
        [],
    )
    known.add("x", "b", 0, 1.0)
    assert (known.is_complete, [name for name, _ in known.matrices("x")]) == (True, ["b"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_is_finite_if_all_of_its_values_are(value):
    known = History()
    assert known.is_finite
    known.add_all("x", ("a", "b"), 5, (1.0, value))
    known.add("y", None, 5, 2.0)
    assert not known.is_finite
    known.add("y", None, 6, 2.0)
    assert known.is_finite
    known.add("y", None, 7, value)
    known.clear()
    assert known.is_finite


def test_what_is_fresh_follows_the_values_of_the_step():
    known = History(Network([ModuleEntry("a", "Linear", (("weight", (2, 2)),)), ModuleEntry("b", "Linear")]))
    known.add("x", "a", 3, 1.0)
    assert [name for name, _ in known.fresh("x")] == [name for name, _ in known.matrices("x")] == ["a"]
    known.add("x", "b", 3, 1.0)
    assert [name for name, _ in known.fresh("x")] == [name for name, _ in known.matrices("x")] == ["a", "b"]
    known.add("x", "b", 4, 1.0)
    assert [name for name, _ in known.fresh("x")] == [name for name, _ in known.matrices("x")] == ["b"]


def test_the_scores_of_the_last_1024_losses_are_kept():
    known = History()
    returned = [(step, float(step % 7), *known.scored["loss"].add((step,), (float(step % 7),))) for step in range(1030)]
    assert [*known.scored["loss"].latest] == returned[-1024:]


def test_a_series_without_values_has_none():
    curve = series([])
    assert (curve.count, curve.step, curve.tail(3), curve.points()) == (0, -1, [], ())
    assert math.isnan(curve.last)
    assert math.isnan(curve.median(3))
    assert series(range(60)).points() == tuple((10 * i, i) for i in range(10, 60))
