"""The scores of the rules about the loss, against the formulas of their docstrings for random series."""

import math
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ikkuna.diagnosis import History
from tests.diagnosis.rows import LAYERS, NETWORK
from tests.diagnosis.test_rules import rule_named


def scores(name, steps, values, every=10):
    """Return the scores of a rule by step; `values` yields kind, name, number and perhaps pass of each value of a step."""
    history, rule, found = History(NETWORK), rule_named(name), {}
    for step in range(steps):
        for kind, series, number, *pass_name in values(step):
            history.add(kind, series, step, number, *pass_name)
        if step % every == 0:
            found[step] = [(score.value, score.figure, score.at_most) for score in rule.scores(history)]
    return found


def close(expected):
    return {
        step: [tuple(n if isinstance(n, str) else pytest.approx(n, nan_ok=True) for n in each) for each in found]
        for step, found in expected.items()
    }


def nan_median(values):
    known = [value for value in values if value == value]
    return median(known) if known else math.nan


PIECES = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.5, 2.0, 2.3, 2.7, 3.2, 4.0, 8.0, math.nan]), st.integers(5, 40)), max_size=5
)


def losses_of(pieces, jitter, first=2.0):
    """Return losses that stay at the levels of pieces, after 20 steps at the first one."""
    levels = [first] * 20 + [level for level, number in pieces for _ in range(number)]
    return [level + jitter * ((7 * i) % 5 - 2) for i, level in enumerate(levels)]


def explained(losses, bounds, step):
    """Return how much of the rise until a step the bounds, of every fifth step, explain."""
    total, last = math.nan, 0
    for at in range(5, step + 1, 5):
        before, loss = losses[last], losses[at]
        change = min(bounds[at], loss - before) if math.isfinite(loss) else bounds[at]
        change = max(change, -before) if before > 0 else change
        total = change if last == 0 else total + change
        last = at
    return math.inf if math.isnan(total) else total


@settings(max_examples=80)
@given(
    pieces=PIECES,
    jitter=st.sampled_from([0.0, 0.05, 0.2]),
    classes=st.sampled_from([None, 1.0, 10.0, 1e4]),
    bound=st.sampled_from([None, 0.0, 0.05, 0.3, 5.0, math.nan]),
    first=st.sampled_from([2.0, 2.0, 0.3, -1.0]),
)
def test_a_loss_diverges_by_its_level_its_noise_and_what_the_movement_explains(pieces, jitter, classes, bound, first):
    losses = losses_of(pieces, jitter, first)
    bounds = [bound and bound * (1 + step % 3) for step in range(len(losses))]

    def values(step):
        yield "loss", None, losses[step]
        if classes is not None:
            yield "output_classes", None, classes
        if bound is not None and step % 5 == 0:
            yield "loss_change_bound", None, bounds[step]

    expected, swing, since = {}, 0, None
    for step in range(0, len(losses), 10):
        seen, expected[step] = losses[: step + 1], []
        if len(seen) <= 20 or min(seen[:10]) <= 0:
            continue
        level, recent = median(seen[:5]), median([x if math.isfinite(x) else math.inf for x in seen[-10:]])
        figure = 1e300 if recent == math.inf else recent
        rise = figure - level
        noise = min(median([abs(b - a) for a, b in pairwise(seen[:20])]), level)
        scale = max(level, math.log(classes)) if classes is not None and classes > 1 else level
        score = min(figure / (1.3 * level), rise / (0.2 * scale), rise / (2 * noise) if noise else math.inf)
        if rise > 0 and bound is not None:
            score = min(score, 2 * explained(losses, bounds, step) / rise)
        if score < 1:
            swing, since = max(swing, 0 if since is None else step - since), None
        else:
            since = step if since is None else since
            score = score if step - since >= 2 * swing else 0.0
        expected[step].append((score, figure, "error"))
    assert scores("diverges", len(losses), values) == close(expected)


@settings(max_examples=25)
@given(
    pieces=PIECES, slope=st.sampled_from([0.0, 1e-5, 3e-5, 1e-3, -1e-4]), first=st.sampled_from([2.0, 0.5, -1.0, 0.0])
)
def test_a_plateau_is_the_level_of_the_last_hundred_steps_over_the_first_one(pieces, slope, first):
    losses = [first - slope * step for step in range(300)]
    losses += [level * 0.5 + 1.0 for level, number in pieces for _ in range(number)] + losses[-60:]
    expected = {}
    for step in range(0, len(losses), 10):
        seen, expected[step] = losses[: step + 1], []
        if len(seen) >= 320:
            recent, before, start = nan_median(seen[-100:]), nan_median(seen[-300:-200]), median(seen[:20])
            is_flat = recent > 0.995 * before and start > 0
            expected[step].append((recent / start / 0.9 if is_flat else 0.0, recent, "error"))
    assert scores("plateau", len(losses), lambda step: [("loss", None, losses[step])]) == close(expected)


@settings(max_examples=40)
@given(
    power=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    factor=st.sampled_from([1.0, -1.0, 0.1, 0.0]),
    first=st.sampled_from([0.0, 0.01, 1.0, math.nan]),
    steps=st.sampled_from([30, 70, 130]),
)
def test_a_loss_has_no_bound_if_it_falls_faster_in_each_third(power, factor, first, steps):
    losses = [first * (1 + step % 3) - factor * step**power for step in range(steps)]
    expected = {}
    for step in range(0, steps, 10):
        seen, expected[step] = losses[: step + 1], []
        if len(seen) < 60 or not all(map(math.isfinite, seen[:20])):
            continue
        half = seen[-(len(seen) // 2) :]
        size = len(half) // 3
        a, b, c, d = (median(half[i : i + 5]) for i in (0, size, 2 * size, len(half) - 5))
        scale = max(abs(median(seen[:5])), max(seen[:10]) - min(seen[:10]))
        is_faster = 0 < a - b < b - c < c - d and scale > 0
        expected[step].append((-d / scale / 100 if is_faster else 0.0, d, "error"))
    assert scores("unbounded_loss", steps, lambda step: [("loss", None, losses[step])]) == close(expected)


@given(
    held_out=st.lists(st.sampled_from([0.5, 0.6, 1.0, 1.04, 1.06, 2.0, 0.0, math.nan]), max_size=9),
    name=st.sampled_from(["testing", "validation", "another"]),
    training=st.sampled_from([0.1, 0.3, 0.5, 0.51, 3.0]),
)
def test_held_out_data_are_compared_with_their_best_value_and_the_training(held_out, name, training):
    def values(step):
        yield "loss", None, training
        if step % 20 == 0:
            yield "loss", None, held_out[step // 20], name

    expected = {}
    for step in range(0, 20 * len(held_out), 10):
        seen, expected[step] = held_out[: step // 20 + 1], []
        if step % 20 == 0 and len(seen) >= 3 and name != "another":
            known = [value for value in seen if value == value]
            best = min(known, default=0.0)
            figure = seen[-1] / best if best > 0 else 0.0
            is_late = bool(known) and len(known) - known.index(best) > 3
            score = figure / 1.05 if is_late and seen[-1] > 2 * training else 0.0
            expected[step].append((score, figure, "error"))
    assert scores("overfit", 20 * len(held_out), values) == close(expected)


@given(number=st.floats(-100, 100), classes=st.sampled_from([None, 0.0, 1.0, 2.0, 10.0, 1e5]))
def test_logits_drift_by_the_size_of_their_normaliser(number, classes):
    def values(step):
        yield "output_log_normalizer", None, number
        if classes is not None:
            yield "output_classes", None, classes

    is_known = classes is not None and classes > 1
    expected = {0: [(abs(number) / (30 + math.log(classes)), number, "error")] if is_known else []}
    assert scores("logit_growth", 1, values) == close(expected)


@settings(max_examples=150)
@given(
    ratios=st.lists(
        st.sampled_from([1.0, 1.02, 1.24, 1.26, 2.0, 2.04, 2.2, 2.4, 4.0, 31.3, 32.0, 32.7]), min_size=1, max_size=7
    ),
    count=st.sampled_from([3.0, 4.0, 32.0]),
    parts=st.sampled_from([None, 1.0, 2.0, 4.0]),
    undivided=st.sampled_from([None, 1.0, 2.0, 4.0]),
    ranks=st.sampled_from([None, 1.0, 2.0]),
    mean=st.sampled_from([2.0, 2.0, 0.0, -1.0]),
)
def test_a_loss_is_a_sum_over_the_batch_its_parts_or_the_ranks(ratios, count, parts, undivided, ranks, mean):
    def values(step):
        yield "output_cross_entropy", None, mean
        yield "loss", None, mean * ratios[step]
        yield "label_count", None, count
        for kind, value in (("micro_batches", parts), ("undivided_losses", undivided), ("averaged_ranks", ranks)):
            if value is not None:
                yield kind, None, value

    expected = {}
    for step in range(len(ratios)):
        seen, expected[step] = ratios[max(step - 3, 0) : step + 1], []
        if mean <= 0 or count < 4:
            continue
        usual, of_ranks = sum(seen) / len(seen), ranks or 1.0
        if abs(seen[-1] / count - 1) < 0.02:
            found = 1.0, seen[-1]
        elif (parts or 1.0) == (undivided or 1.0) > 1 and abs(usual - 1) < 0.25:
            found = 1.0, parts
        elif (
            len(seen) == 4
            and of_ranks > 1 >= (parts or 1.0)
            and abs(usual / of_ranks - 1) < 0.03
            and all(abs(each / of_ranks - 1) < 0.15 for each in seen)
        ):
            found = 1.0, of_ranks
        else:
            found = 0.0, seen[-1]
        expected[step].append((*found, "error"))
    assert scores("loss_scale", len(ratios), values, every=1) == close(expected)


def levels_between(losses, samples, window):
    """Return the losses of all steps, also between the samples, in the first and in the last window."""
    first, last = 10 * (samples - window - 10), 10 * (samples - window)
    return median(losses[first : first + 10 * (window - 1) + 1]), median(losses[last:])


def share_of_guess(means, entropies, count, classes, moved):
    """Return the guess, the window, and the shares of the last and of the first window; ``None`` if that is too early."""
    bias, most = (classes - 1) / (2 * count), math.log(classes)
    guess, window = min(median(entropies[-10:]) + bias, most), max(math.ceil(200 / count), 4)
    if len(means) < window + 10 or moved < 0.005 or guess < 0.2:
        return None
    shares = [mean / min(max(entropy, 0.2) + bias, most) for mean, entropy in zip(means, entropies, strict=True)]
    shares = shares[-window - 10 :]
    return guess, window, median(shares[-window:]), median(shares[:window])


@settings(max_examples=80)
@example(means=[2.0] * 20, entropy=0.1, count=400.0, classes=10.0, ratio=1e-2, bound=None, loss=None, dip=0.0)
@example(means=[2.0] * 20, entropy=2.1, count=32.0, classes=10.0, ratio=1e-2, bound=0.0, loss=1.0, dip=0.05)
@given(
    means=st.lists(st.sampled_from([1.9, 2.0, 2.1, 2.2, 2.25]), min_size=8, max_size=24),
    entropy=st.sampled_from([0.1, 1.5, 1.9, 2.1, 2.3]),
    count=st.sampled_from([8.0, 32.0, 400.0]),
    classes=st.sampled_from([1.0, 2.0, 10.0, 10.0]),
    ratio=st.sampled_from([0.0, 2e-4, 1e-3, 1e-2]),
    bound=st.sampled_from([None, 0.0, 0.1, -0.002, -0.01, -0.5]),
    loss=st.sampled_from([None, 1.0, 1.005, 1.015, 3.0]),
    dip=st.sampled_from([0.0, 0.05]),
)
def test_nothing_is_learned_if_the_cross_entropy_stays_that_of_a_guess(
    means, entropy, count, classes, ratio, bound, loss, dip
):
    steps = 10 * len(means) - 9
    losses = np.interp(np.arange(steps), 10 * np.arange(len(means)), means) * (loss or 1.0)
    losses *= 1 - dip * (np.arange(steps) % 10 != 0) * (np.arange(steps) > steps / 2)  # lower between the samples
    entropies = [entropy + 0.2 * (5 * i % 3) for i in range(len(means))]

    def values(step):
        if step % 10 == 0:
            yield "output_cross_entropy", None, means[step // 10]
            yield "label_entropy", None, entropies[step // 10]
            yield "label_count", None, count
            yield "output_classes", None, classes
            for layer in LAYERS:
                yield "weight_updates_weights_ratio", layer, ratio
            if bound is not None:
                yield "loss_change_bound", None, bound
        if loss is not None:
            yield "loss", None, losses[step]

    expected = {}
    for step in range(0, steps, 10):
        number, expected[step], known = step // 10 + 1, [], losses[: step + 1]
        found = classes > 1 and share_of_guess(means[:number], entropies[:number], count, classes, ratio * number)
        if not found:
            continue
        guess, window, now, before = found
        falls = now <= 0.98 * before
        if loss is not None and abs(loss - 1) <= 0.01 * loss:
            first, last = levels_between(known, number, window)
            falls |= bool(last <= 0.98 * first)
            now = min(now, last / guess)
        raised = -math.inf
        if bound is not None:
            falls |= -bound * 10 > 0.02 * guess
            raised = median(known[-16:]) - median(known[:5]) - bound * number if loss is not None else raised
        expected[step].append((0.0 if falls else now / 0.95, now, "info" if raised > guess else "error"))
    assert scores("no_learning", steps, values) == close(expected)


@pytest.mark.parametrize(
    ("name", "subscriber"),
    [
        ("diverges", "LossChangeBoundSubscriber"),
        ("loss_spike", "LossChangeBoundSubscriber"),
        ("loss_at_init", "PredictionSubscriber"),
    ],
)
@pytest.mark.parametrize("every", [1, 7])
def test_a_rule_brings_its_subscriber_with_the_rhythm_of_the_rules(name, subscriber, every):
    (found,) = rule_named(name).subscribers(NETWORK, every)
    assert (type(found).__name__, found.subscription.subsample) == (subscriber, every)
