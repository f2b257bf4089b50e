"""The score of a rule is its figure over its threshold, and its conditions hold exactly where its text says."""

import math

import pytest

from ikkuna.diagnosis import Judge
from ikkuna.diagnosis.history import History, Network
from ikkuna.store.values import ModuleEntry
from tests.diagnosis.rows import LAYERS, NETWORK, ROWS, classification, layers, sampled
from tests.diagnosis.test_rules import findings, rule_named

FACTS = {0.0, 1.0}
PATIENCE = {"dead_units", "gradient_spike", "one_label"}
"""Rules whose healthy run is healthy because the mistake does not last."""
NARROW = {"no_better_than_constant", "no_learning", "plateau", "rank_collapse", "dead_units"}
"""Rules whose figure cannot be far from its threshold: a loss is at most that of a guess, and a share at most 1."""


def scores(name, series, steps=400, held_out=None):
    """Return the scores of a rule, in order, as ``(step, module, value)``."""
    rule, found, errors = rule_named(name), [], []
    judged = rule.scores

    def scores_of(history):
        try:
            for score in judged(history):
                found.append((history.step, score.module, score.value))
                yield score
        except Exception as error:  # the judge would go on without the rule
            errors.append(error)
            raise

    rule.scores = scores_of
    judge = Judge([rule], NETWORK)
    for step in range(steps):
        for (kind, module), value in series.items():
            if (number := value(step)) is not None:
                judge.add(kind, module, step, number)
        judge.finish_step(step)
        if held_out is not None and (number := held_out(step)) is not None:
            judge.add("loss", None, step, number, "testing")
            judge.finish_step(step)
    assert not errors
    return found


def last(name, series, steps=400, held_out=None, module=None):
    """Return the last score of a series; ``None`` if there is none."""
    values = [value for _, of, value in scores(name, series, steps, held_out) if of == module]
    return values[-1] if values else None


@pytest.mark.parametrize("name", ROWS)
def test_healthy_runs_stay_below_four_fifths_of_a_threshold_and_mistakes_are_a_fifth_above(name):
    worse, better = ([value for _, _, value in scores(name, series)] for series in ROWS[name])
    if set(worse) <= FACTS:
        assert 1.0 in worse
        assert set(better) <= ({0.0, 1.0} if name in PATIENCE else {0.0})
    else:
        assert max(worse) > (1.0 if name in NARROW else 1.2)
        assert max(better, default=0.0) < (math.inf if name in PATIENCE else 0.9 if name in NARROW else 0.8)


def loss(*pieces):
    """Return a series of losses: each piece is a value or a function of the step, and its number of steps."""

    def value(step):
        for piece, number in pieces:
            if step < number:
                return piece(step) if callable(piece) else piece
            step -= number
        return piece(step) if callable(piece) else piece

    return {("loss", None): value}


def falling(share, factor=1):
    """Return losses that fall by a share in each 100 steps, where the rules have a sample as well as between."""
    return lambda step: factor * 0.95 * GUESS * (1 if step == 170 else share ** ((step - 170) / 100))


def accumulated(loss, number, undivided, **values):
    """Return a classifier whose steps have several micro-batches, of some of which the loss itself is differentiated."""
    values |= {"micro_batches": number, "undivided_losses": undivided}
    return classification(loss=lambda step: loss, output_cross_entropy=2.0, **values)


def guess(**values):
    """Return a classifier of 10 classes at a guess that does not learn, with other values for some series."""
    moved = layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1e-3, head=1e-3)
    return classification(**values) | moved


def moved(ratios, **others):
    """Return such a classifier whose updates have these ratios to the weights, the same for all layers but `others`."""
    series = {("weight_updates_weights_ratio", name): sampled(others.get(name, ratios)) for name in LAYERS}
    return classification(output_cross_entropy=0.95 * GUESS) | series


def of_ranks(*ratios):
    """Return a classifier on two ranks whose losses are its cross-entropy, 2, times these ratios in turn."""
    values = {"output_cross_entropy": 2.0, "averaged_ranks": 2.0}
    return classification(loss=lambda step: 2.0 * ratios[step // 10 % len(ratios)], **values)


def lowered(bound, sample, loss=5.0):
    """Return a classifier at a guess, of whose samples one has a movement that changes the loss."""
    bounds = sampled([0.0] * sample + [bound, 0.0])
    return guess(output_cross_entropy=0.95 * GUESS, loss=lambda step: loss, loss_change_bound=bounds)


def windows(first=1.04, last=1.04, now=1.0):
    """Return a classifier at a guess with 31 losses in its first window, half of them higher, and in its last one."""
    level = 0.95 * (2.1 + 9 / 640)

    def value(step):
        if step <= 30:
            return level * {0: first, 1: 0.9, 30: last}.get(step, 1.04 if step % 2 else 0.9)
        if step < 100:
            return level * 1.3  # between the windows
        return level * ({100: now, 130: 1.0}.get(step, 1.1 if step % 2 else 1.0))

    return guess(output_cross_entropy=level, label_count=320.0, loss=value)


def at_guesses(bound=0.0):
    """Return a classifier at a guess whose labels are more even in the last nine of 21 samples."""
    entropies = [1.0] * 12 + [1.5] * 9
    means = sampled([0.95 * (entropy + 9 / 64) for entropy in entropies])
    bounds = sampled([0.0] * 15 + [bound, 0.0])
    series = {"label_entropy": sampled(entropies), "loss": lambda step: 5.0, "loss_change_bound": bounds}
    return guess(output_cross_entropy=means, **series)


GUESS = 2.1 + 9 / 64  # the entropy of the labels, and the correction for 10 classes and 32 labels


@pytest.mark.parametrize(
    ("name", "series", "steps", "score"),
    [
        # 1.3 times the first level, a fifth of the larger of it and a guess, twice the noise
        ("diverges", loss((2.0, 20), (2.6, 30)), 50, 1.0),
        ("diverges", loss((2.0, 20), (2.08, 30)), 50, 0.2),
        ("diverges", loss((2.0, 20), (5.2, 30)), 50, 2.0),
        ("diverges", loss((2.0, 20), (math.nan, 30)), 50, 1e300 / 2.6),
        ("diverges", loss((2.0, 20), (4.0, 30)) | {("output_classes", None): sampled([1e6])}, 50, 10 / math.log(1e6)),
        ("diverges", loss((lambda step: 2.0 + step % 2 / 4, 20), (2.45, 30)), 50, 0.9),
        ("diverges", loss((-2.0, 20), (5.2, 30)), 50, None),
        ("diverges", loss((0.0, 20), (5.2, 30)), 50, None),
        ("diverges", loss((2.0, 9), (-2.0, 1), (5.2, 30)), 50, None),
        ("diverges", loss((2.0, 10), (-2.0, 1), (5.2, 30)), 50, 2.0),
        ("diverges", loss((2.0, 20), (5.2, 30)), 20, None),
        # twice the share of the rise that the movement of the weights can have made; a loss of 2 cannot fall by more than 2
        ("diverges", loss((2.0, 20), (5.2, 30)) | {("loss_change_bound", None): sampled([0, 0, 0.8, 0, 0])}, 50, 0.5),
        ("diverges", loss((2.0, 20), (5.2, 30)) | {("loss_change_bound", None): sampled([0, 0, 1.6, 0, 0])}, 50, 1.0),
        ("diverges", loss((2.0, 20), (5.2, 30)) | {("loss_change_bound", None): sampled([0, -90, 8.4, 0])}, 50, 0.75),
        ("diverges", loss((2.0, 20), (5.2, 30)) | {("loss_change_bound", None): sampled([0, math.nan])}, 50, 2.0),
        # between two samples they have made no more than the loss has risen by: 0.8 at step 20, where the bound is 0.4, nothing later
        (
            "diverges",
            loss((2.0, 20), (2.8, 10), (5.2, 30)) | {("loss_change_bound", None): sampled([0, 0, 0.4, 0.8, 9.0])},
            50,
            2 * 1.2 / 3.2,
        ),
        # the loss was high for 20 steps and has come back: the next time it must stay for 40
        ("diverges", loss((2.0, 20), (5.2, 25), (2.0, 35), (5.2, 50)), 120, 0.0),
        ("diverges", loss((2.0, 20), (5.2, 25), (2.0, 35), (5.2, 80)), 150, 2.0),
        ("diverges", loss((2.0, 20), (2.8, 30)) | {("loss_change_bound", None): sampled([0, 0, 0.2, 0])}, 50, 0.5),
        (
            "diverges",
            loss((2.0, 1), (2.8, 1), (2.0, 18), (5.2, 30)) | {("loss_change_bound", None): {0: 9.0, 1: 0.8}.get},
            50,
            0.5,
        ),
        # the loss was below 0, from where it can have fallen by any amount: 3.6 less 2 of what the movement has made
        (
            "diverges",
            loss((2.0, 20), (-1.0, 10), (5.2, 30)) | {("loss_change_bound", None): sampled([0, 0, 0, 3.6, 0])},
            50,
            1.0,
        ),
        # twice log C
        ("loss_at_init", classification(output_cross_entropy=2 * math.log(10)), 1, 1.0),
        ("loss_at_init", classification(output_cross_entropy=3 * math.log(10)), 11, 1.5),
        ("loss_at_init", classification(output_cross_entropy=3 * math.log(10), output_classes=1.0), 1, None),
        (
            "loss_at_init",
            classification(output_cross_entropy=3 * math.log(10)) | {("weight_requires_grad", "fc0"): sampled([0.0])},
            1,
            None,
        ),
        # within 2% of the mean times the number of labels
        ("loss_scale", classification(loss=lambda step: 2.0 * 32 * 1.0199, output_cross_entropy=2.0), 11, 1.0),
        ("loss_scale", classification(loss=lambda step: 2.0 * 32 * 1.0201, output_cross_entropy=2.0), 11, 0.0),
        ("loss_scale", classification(loss=lambda step: 2.0 * 32 * 0.9801, output_cross_entropy=2.0), 11, 1.0),
        ("loss_scale", classification(loss=lambda step: 2.0 * 32 * 0.9799, output_cross_entropy=2.0), 11, 0.0),
        ("loss_scale", classification(loss=lambda step: 8.0, output_cross_entropy=2.0, label_count=4.0), 11, 1.0),
        ("loss_scale", classification(loss=lambda step: 6.0, output_cross_entropy=2.0, label_count=3.0), 11, None),
        ("loss_scale", classification(loss=lambda step: 0.0, output_cross_entropy=0.0), 11, None),
        ("loss_scale", classification(loss=lambda step: 0.01 * 32, output_cross_entropy=0.01), 11, 1.0),
        # the losses of all micro-batches, which are cross-entropies; of none; of some; two of one batch; other losses; one batch
        ("loss_scale", accumulated(2.0, 8.0, 8.0), 11, 1.0),
        ("loss_scale", accumulated(2.0, 2.0, 2.0), 11, 1.0),
        ("loss_scale", accumulated(2.49, 8.0, 8.0), 11, 1.0),
        ("loss_scale", accumulated(1.51, 8.0, 8.0), 11, 1.0),
        ("loss_scale", accumulated(2.5, 8.0, 8.0), 11, 0.0),
        ("loss_scale", accumulated(2.0, 8.0, 0.0), 11, 0.0),
        ("loss_scale", accumulated(2.0, 8.0, 7.0), 11, 0.0),
        ("loss_scale", accumulated(2.0, 1.0, 2.0), 11, 0.0),
        ("loss_scale", accumulated(2.6, 8.0, 8.0), 11, 0.0),
        ("loss_scale", accumulated(2.0, 1.0, 1.0), 11, 0.0),
        # the number of ranks, on average over 4 samples; not over 3, and not if micro-batches have another cross-entropy
        ("loss_scale", classification(loss=lambda step: 4.1, output_cross_entropy=2.0, averaged_ranks=2.0), 31, 1.0),
        ("loss_scale", classification(loss=lambda step: 4.1, output_cross_entropy=2.0, averaged_ranks=2.0), 21, 0.0),
        ("loss_scale", classification(loss=lambda step: 4.2, output_cross_entropy=2.0, averaged_ranks=2.0), 31, 0.0),
        ("loss_scale", accumulated(4.0, 2.0, 0.0, averaged_ranks=2.0), 31, 0.0),
        ("loss_scale", of_ranks(2.29, 1.71), 31, 1.0),
        ("loss_scale", of_ranks(2.31, 1.69), 31, 0.0),  # none of the four differs by more than 15%
        ("loss_scale", of_ranks(2.05, 2.05), 31, 1.0),
        ("loss_scale", of_ranks(2.07, 2.07), 31, 0.0),
        ("loss_scale", of_ranks(1.93, 1.93), 31, 0.0),
        # 0.95 of the guess from the labels' frequencies, less than 2% better than 10 samples before
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS), 400, 1.0),
        ("no_learning", guess(output_cross_entropy=0.76 * GUESS), 400, 0.8),
        ("no_learning", guess(output_cross_entropy=math.log(10), label_entropy=5.0), 400, 1 / 0.95),
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS), 151, None),  # 7 samples have 200 labels, and 10 more
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS), 161, 1.0),
        ("no_learning", guess(output_cross_entropy=0.3, label_entropy=0.04), 400, None),
        ("no_learning", guess(output_cross_entropy=GUESS, output_classes=1.0), 400, None),
        ("no_learning", guess(output_cross_entropy=math.log(2), output_classes=2.0), 400, 1 / 0.95),
        ("no_learning", classification(output_cross_entropy=GUESS), 400, None),  # nothing moves
        (
            "no_learning",
            guess(output_cross_entropy=sampled([GUESS * 0.9805 ** (i / 10) for i in range(40)])),
            171,
            0.9805**1.4 / 0.95,
        ),
        ("no_learning", guess(output_cross_entropy=sampled([GUESS * 0.97 ** (i / 10) for i in range(40)])), 171, 0.0),
        # single samples that differ hide the fall, which the losses of all steps show; losses that are not the cross-entropy do not count
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS, loss=falling(0.97)), 171, 0.0),
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS, loss=falling(0.99)), 171, 1.0),
        ("no_learning", guess(output_cross_entropy=0.95 * GUESS, loss=falling(0.97, factor=2)), 171, 1.0),
        # each sample against the entropy of its own labels; the guess is that of the last ten samples
        ("no_learning", at_guesses(), 210, 1.0),
        ("no_learning", at_guesses(-0.02 * (1.5 + 9 / 64)), 210, 1.0),
        ("no_learning", at_guesses(-0.0201 * (1.5 + 9 / 64)), 210, 0.0),
        # at least four samples, of which ten are older
        ("no_learning", guess(output_cross_entropy=0.95 * (2.1 + 9 / 640), label_count=320.0), 121, None),
        ("no_learning", guess(output_cross_entropy=0.95 * (2.1 + 9 / 640), label_count=320.0), 131, 1.0),
        # the correction for a single label makes the guess log C
        (
            "no_learning",
            guess(output_cross_entropy=0.95 * math.log(2), output_classes=2.0, label_entropy=0.1, label_count=1.0)
            | loss((5.0, 1)),
            2101,
            1.0,
        ),
        # the number of labels is that of the last ten samples
        (
            "no_learning",
            guess(output_cross_entropy=0.95 * (2.1 + 9 / 640), label_count=sampled([8.0] * 12 + [320.0] * 9)),
            201,
            1.0,
        ),
        ("no_learning", moved([0.0]), 400, None),
        # the median of all losses from the first to the last sample of a window, both of which count
        ("no_learning", windows(), 131, 0.0),
        ("no_learning", windows(first=0.9), 131, 1.0),
        (
            "no_learning",
            guess(output_cross_entropy=2.0, label_count=320.0, loss=lambda step: 2.04 if step <= 30 else 0.98 * 2.04),
            131,
            0.0,
        ),
        ("no_learning", windows(last=0.9), 131, 1.0),
        ("no_learning", windows(now=1.1), 131, 1.0),
        # the movement has lowered the loss by more than 2% of the guess in the last ten samples
        ("no_learning", lowered(-0.02 * GUESS, 12), 171, 1.0),
        ("no_learning", lowered(-0.0201 * GUESS, 12), 171, 0.0),
        ("no_learning", lowered(-0.0201 * GUESS, 8), 171, 0.0),
        ("no_learning", lowered(-0.0201 * GUESS, 7), 171, 1.0),
        ("no_learning", lowered(0.0201 * GUESS, 12), 171, 1.0),
        ("no_learning", moved([0.005, 0.0]), 400, 1.0),
        ("no_learning", moved([0.004, 0.0]), 400, None),
        ("no_learning", moved([1e-3], fc0=[0.0], fc1=[1e-9]), 400, 1.0),  # the upper median of those that moved
        # the last 100 steps against those before the last 200
        ("plateau", loss((2.0, 400)), 400, 1 / 0.9),
        ("plateau", loss((2.0, 110), (1.6, 400)), 400, 0.8 / 0.9),
        ("plateau", loss((2.0, 200), (1.9902, 400)), 400, 0.9951 / 0.9),
        ("plateau", loss((2.0, 200), (1.9898, 400)), 400, 0.0),
        ("plateau", loss((3.0, 100), (2.0, 300)), 400, 2 / 3 / 0.9),
        ("plateau", loss((0.5, 400)), 400, 1 / 0.9),
        ("plateau", loss((2.0, 400)), 319, None),
        ("plateau", loss((-2.0, 400)), 400, 0.0),
        # 30 + log C
        ("logit_growth", classification(output_log_normalizer=30 + math.log(10)), 1, 1.0),
        ("logit_growth", classification(output_log_normalizer=-0.8 * (30 + math.log(10))), 1, 0.8),
        ("logit_growth", classification(output_log_normalizer=90.0, output_classes=1.0), 1, None),
        # a fifth of the last 50 steps, from the 100th on
        ("scaler_skips", {("step_skipped", None): lambda step: float(step % 5 == 0)}, 400, 1.0),
        ("scaler_skips", {("step_skipped", None): lambda step: float(step % 10 == 0)}, 400, 0.5),
        ("scaler_skips", {("step_skipped", None): lambda step: float(step < 60)}, 101, 0.9),
        ("scaler_skips", {("step_skipped", None): lambda step: float(step % 5 == 0)}, 99, None),
        ("scaler_skips", {("step_skipped", None): lambda step: float(step < 60) if step != 55 else None}, 101, 0.9),
        ("scaler_skips", {("step_skipped", None): lambda step: float(step < 65)}, 111, 0.4),  # every tenth step
    ],
)
def test_the_score_of_the_network(name, series, steps, score):
    assert last(name, series, steps) == (score if score is None else pytest.approx(score, rel=1e-9))


SIZE = {"fc0": 100.0, "fc1": 100.0, "head": math.sqrt(1000)}  # square roots of the numbers of weights


def gradients(**scales):
    """Return gradients whose root mean squares are given, 1.0 by default."""
    return layers("weight_gradients_norm2", **{name: scales.get(name, 1.0) * SIZE[name] for name in LAYERS})


@pytest.mark.parametrize(
    ("name", "series", "module", "score"),
    [
        ("exploding_gradient", gradients(fc0=100.0), "fc0", 1.0),
        ("exploding_gradient", gradients(fc0=80.0, head=0.5), "fc0", 1.6),
        ("exploding_gradient", gradients(fc1=300.0), "fc0", 0.01),
        ("exploding_gradient", gradients(fc0=80.0, head=0.0), "fc0", None),
        ("exploding_gradient", gradients(head=100.0), "head", None),
        ("vanishing_gradient", gradients(fc0=1e-4), "fc0", 1.0),
        ("vanishing_gradient", gradients(fc0=1e-4, fc1=2e-4), "fc0", 1.0),
        ("vanishing_gradient", gradients(fc0=1e-5, fc1=1e-5), "fc1", 10.0),
        ("vanishing_gradient", gradients(fc1=1e-5), "fc1", 0.0),  # behind a larger one
        ("vanishing_gradient", gradients(fc0=10.0, fc1=1e-4, head=10.0), "fc1", 0.0),
        ("vanishing_gradient", gradients(fc1=1e-4), "fc1", 0.0),
        ("vanishing_gradient", gradients(fc0=1e-5, fc1=1.0, head=1e-5), "fc0", 0.0),
        ("vanishing_gradient", gradients(fc0=0.0), "fc0", None),
        ("vanishing_gradient", gradients(fc0=1e-3, fc1=10.0, head=10.0), "fc0", 1.0),
    ],
)
def test_the_score_of_a_matrix(name, series, module, score):
    assert last(name, series, 1, module=module) == (score if score is None else pytest.approx(score, rel=1e-9))


@pytest.mark.parametrize(
    ("name", "series", "figure"),
    [
        ("exploding_gradient", gradients(fc0=400.0, head=0.5), 800.0),
        ("vanishing_gradient", gradients(fc0=1e-6, head=4.0), 2.5e-7),
    ],
)
def test_the_figure_of_a_matrix_is_a_ratio_of_scales(name, series, figure):
    assert [finding.value for finding in findings(rule_named(name), series, 41)] == [pytest.approx(figure)]


@pytest.mark.parametrize(
    ("values", "score"), [([0.0], 1.0), ([1.0] + [0.0] * 19, 0.0), ([1.0] * 30 + [0.0] * 20, 1.0), ([1e-30], 0.0)]
)
def test_a_gradient_is_zero_in_its_first_or_in_its_last_twenty_samples(values, score):
    series = layers("weight_gradients_norm2") | {("weight_gradients_norm2", "fc1"): sampled(values)}
    assert last("zero_gradient", series, 10 * len(values), module="fc1") == score
    assert last("zero_gradient", layers("weight_gradients_norm2", fc0=0.0, fc1=0.0, head=0.0), 1, module="fc1") == 0.0


@pytest.mark.parametrize(
    ("name", "first", "then", "score"),
    [
        ("clipped_hard", 1.0, 0.01, 1.0),
        ("clipped_hard", 1.0, 0.1, 0.1),
        ("not_zeroed", 1.0, 3.0, 1.0),
        ("not_zeroed", 0.5, 3.0, 1.0),  # clipped in the first step
        ("not_zeroed", 4.0, 12.0, 1.0),  # four micro-batches
        ("not_zeroed", 4.0, 4.0, 1 / 3),
        ("not_zeroed", 1.0, math.inf, math.inf),
    ],
)
def test_the_score_of_gradients_against_those_of_a_backward(name, first, then, score):
    series = {("weight_gradients_norm2", module): sampled([first, then]) for module in LAYERS}
    assert last(name, series | layers("weight_micro_gradients_norm2"), 11) == pytest.approx(score)


@pytest.mark.parametrize(
    ("whole", "number", "score"),
    [(512.0, 256.0, 0.0), (512.0, 1.0, 1.0), (2.0 * 6 * 4096, 6.0, 1.0), (2.0 * 4096, 6.0, 1.0), (24.0, 12.0, 0.0)],
)
def test_the_factor_of_a_scaler_is_not_the_number_of_micro_batches(whole, number, score):
    series = gradients() | layers("weight_micro_gradients_norm2") | {("micro_batches", None): sampled([number])}
    losses = {("loss", None): sampled([2.0]), ("loss", "objective"): sampled([whole])}
    assert last("scaler_bypassed", series | losses, 11) == score


def test_gradients_of_a_backward_that_gave_zeros_are_those_of_earlier_steps():
    series = layers("weight_gradients_norm2") | layers("weight_micro_gradients_norm2", fc0=0.0, fc1=0.0, head=0.0)
    assert last("not_zeroed", series, 1) == pytest.approx(1 / 3)
    assert last("clipped_hard", series, 1) == pytest.approx(1e-8)


def test_a_gradient_whose_share_of_a_backward_is_no_number_has_no_score():
    least = dict.fromkeys(LAYERS, 5e-324)
    series = layers("weight_gradients_norm2", **least) | layers(
        "weight_micro_gradients_norm2", fc0=4.0, fc1=4.0, head=4.0
    )
    assert not [*scores("clipped_hard", series, 1)]


def test_weights_without_an_optimizer_do_not_count():
    series = layers("weight_gradients_norm2", fc0=0.01, fc1=0.01) | layers("weight_micro_gradients_norm2")
    unowned = {("unowned_parameters", name): sampled([1.0]) for name in ("fc0", "fc1")}
    assert last("clipped_hard", series, 1) == pytest.approx(1.0)
    assert last("clipped_hard", series | unowned, 1) == pytest.approx(0.01)


def spiked(sample, factor, **others):
    """Return gradients of 1 that are multiplied at one sample."""
    values = [1.0] * sample + [factor]
    return {("weight_gradients_norm2", name): sampled(others.get(name, values)) for name in LAYERS}


@pytest.mark.parametrize(
    ("series", "steps", "score"),
    [
        (spiked(20, 30.0), 201, 1.0),
        (spiked(20, math.sqrt(30.0)), 201, 0.5),
        (spiked(20, 900.0), 201, 2.0),
        (spiked(20, 30.0), 211, 1.0),  # the last two samples are not what is usual
        (spiked(20, 30.0, fc0=[1.0]), 201, 1.0),  # half of the matrices
        (spiked(20, 30.0, fc0=[0.0] * 20 + [1.0]), 201, 1.0),
        (spiked(20, 30.0, fc0=[1.0], fc1=[1.0]), 201, 0.0),
        (spiked(12, 30.0), 121, 1.0),
        (spiked(11, 30.0), 111, None),
        (spiked(20, 0.0), 201, None),
        (spiked(20, math.inf), 201, math.inf),
    ],
)
def test_the_score_of_a_spike_of_gradients(series, steps, score):
    found = [(step, value) for step, _, value in scores("gradient_spike", series, steps)]
    at_the_end = [value for step, value in found if step == steps - 1]
    assert at_the_end == ([] if score is None else [pytest.approx(score)])


@pytest.mark.parametrize(
    ("held_out", "score"),
    [
        ([1.0, 5.0, 5.0, 5.0, 1.05], 1.0),  # the best value is 4 passes old
        ([1.0, 5.0, 5.0, 1.05], 1.0),
        ([1.0, 5.0, 1.05], 0.0),  # it is only 2 passes old
        ([5.0, 1.0, 5.0, 1.05], 0.0),
        ([1.0, 5.0, 5.0, 2.1], 2.0),
        ([2.0, 0.5, 0.5, 0.5, 0.5, 1.05], 2.0),
        ([1.0, 1.05], None),
        ([0.2, 0.5, 0.5, 0.4], 0.0),  # not twice the loss of the training, which is 0.25
        ([0.2, 0.5, 0.5, 0.51], 0.51 / 0.2 / 1.05),
        ([0.0, 5.0, 5.0, 5.0], 0.0),
        ([math.nan, 1.0, 5.0, 5.0, 1.05], 1.0),
    ],
)
def test_the_score_of_held_out_data(held_out, score):
    passes = sampled(held_out)
    series = {("loss", None): lambda step: 0.25}
    found = last("overfit", series, 10 * len(held_out) - 9, passes)
    assert found == (score if score is None else pytest.approx(score))


@pytest.mark.parametrize(("units", "score"), [(10.0, 1.0), (8.0, 0.8), (25.0, 2.5)])
def test_the_score_of_a_spike_of_the_loss(units, score):
    def curve(step):  # its median is 10, the median deviation of 1 and 7 is 4, and the unit is 1.4826 times that
        return 10.0 + 5.9304 * units if step == 100 else 10.0 + (-7, -1, 1, 7)[step % 4]

    assert max(value for *_, value in scores("loss_spike", {("loss", None): curve}, 121)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("classes", "frozen", "score"),
    [
        (("Linear", "BatchNorm2d"), (), 1.0),
        (("Linear", "BatchNorm2d"), ("1",), 0.0),
        (("Linear", "BatchNorm2d"), ("0",), 1.0),
        (("BatchNorm2d", "BatchNorm2d"), ("0",), 1.0),
        (("Dropout", "BatchNorm2d"), ("1",), 1.0),
        (("Linear", "LayerNorm"), (), 0.0),
    ],
)
def test_a_frozen_batch_norm_in_evaluation_mode_is_right(classes, frozen, score):
    """Its running statistics belong to its weights, which do not change."""
    judge = Judge(
        [rule := rule_named("evaluation_mode")], Network(ModuleEntry(str(i), c) for i, c in enumerate(classes))
    )
    for i in range(len(classes)):
        judge.add("weight_requires_grad", str(i), 0, float(str(i) not in frozen))
    judge.add("evaluation_mode", None, 0, 1.0)
    judge.finish_step(0)
    assert [found.value for found in rule.scores(judge.history)] == [score]


STEP = 2.0**-7


def jump_of_loss(jump, first=0.0, bounds=(), norms=(), **settings):
    """Return the scores of a jump after losses that are `STEP` below and above 10; the first five are `first` higher."""
    history, rule = History(NETWORK), type(rule_named("loss_spike"))(**settings)
    losses = [*[10.0 + first] * 5, *[10.0 - STEP, 10.0 + STEP] * 20]
    for step, value in enumerate([*losses, 10.0 + STEP + jump]):  # the median of the last 16 is 10 + STEP
        history.scored["loss"].add((step,), (value,))
        history.add("loss", None, step, value)
    for step, bound in bounds:
        history.add("loss_change_bound", None, step, bound)
    for i, (gradient, weight) in enumerate(norms):
        history.add("weight_gradients_norm2", LAYERS[i], 45, gradient)
        history.add("weights_norm2", LAYERS[i], 45, weight)
    found = [score for score in rule.scores(history) if score.step == 45]
    assert not [*rule.scores(history)]  # each loss has one score
    return found


@pytest.mark.parametrize(
    ("options", "at_most"),
    [
        ({}, "error"),
        # the first losses differ by as much, or by more
        ({"first": -3.9}, "error"),
        ({"first": STEP - 4.0}, "error"),
        ({"first": -4.0}, "info"),
        ({"first": -4.1}, "info"),
        # the loss falls
        ({"first": 3.0, "jump": 400.0}, "info"),
        # half of the jump at this step; at another one it says nothing
        ({"bounds": [(45, 2.0)]}, "error"),
        ({"bounds": [(45, 1.99)]}, "info"),
        ({"bounds": [(45, 0.24)], "jump": 0.5}, "info"),
        ({"bounds": [(44, 1.99)]}, "error"),
        ({"bounds": [(45, 2.0)], "first": -4.1}, "error"),
        # something else has raised the loss by more than this jump
        ({"bounds": [(43, -2.0), (44, -1.9)]}, "error"),
        ({"bounds": [(43, -2.0), (44, STEP - 2.0)]}, "error"),
        ({"bounds": [(43, -2.0), (44, -2.1)]}, "info"),
    ],
)
def test_how_grave_a_jump_of_the_loss_is(options, at_most):
    (score,) = jump_of_loss(**{"jump": 4.0} | options)
    assert (score.at_most, score.value > 1) == (at_most, True)
    assert ("the batch" in score.detail) is (options.get("bounds") in ([(45, 1.99)], [(45, 0.24)]))


@pytest.mark.parametrize(
    ("norms", "count"),
    [
        ([(2.0**12, 2.0**13)], 1),  # 2
        ([(2.0**12, 2.0**13), (2.0**13, 1.99 * 2**11)], 1),  # almost 4
        ([(2.0**12, 2.0**13), (2.0**13, 2.01 * 2**11)], 0),
        ([(2.0**12, 2.0**13), (2.0**13, 2.0**12)], 0),
        ([(math.inf, 2.0**13), (2.0**13, 2.0**12)], 1),
        ([(1e200, 1e200)], 1),
        ([(0.0, 1.0)], 1),
    ],
)
def test_a_jump_below_the_rounding_error_of_the_weights_is_none(norms, count):
    assert len(jump_of_loss(4.0, norms=norms)) == count


@pytest.mark.parametrize(
    ("levels", "first", "steps", "score"),
    [
        ((0, -10, -30, -200), 1.0, 291, 2.0),
        ((0, -10, -30, -50.5), 1.0, 291, 0.505),
        ((0, -0.5, -30, -200), 1.0, 291, 2.0),
        ((0, -10, -20, -200), 1.0, 291, 0.0),  # no faster
        ((0, -10, -30, -50), 1.0, 291, 0.0),
        ((0, 0, -30, -200), 1.0, 291, 0.0),
        ((0, 1, -30, -200), 1.0, 291, 0.0),
        ((0, -10, -30, -200), 0.0, 291, 0.0),  # no size of a loss is known
        ((0, -10, -30, -200), -4.0, 291, 0.5),
        ((0, -10, -30, -200), lambda step: (-1.0, 9.0)[step % 2], 291, 0.2),
        ((0, -10, -30, -200), lambda step: math.nan if step == 19 else 1.0, 291, None),
        ((0, -10, -30, -200), lambda step: 1.0 if step else -math.inf, 291, None),
        ((0, 0, 0, 0), 1.0, 51, None),
        ((0, 0, 0, 0), 1.0, 61, 0.0),
    ],
)
def test_the_score_of_a_loss_without_a_bound(levels, first, steps, score):
    """The thirds of the second half of 291 losses begin at 146, 194 and 242, and it ends with 286 to 290."""
    series = loss((first, 20), *zip(levels, (160, 40, 40, 40), strict=True))
    assert last("unbounded_loss", series, steps) == (score if score is None else pytest.approx(score))


def test_a_jump_at_the_threshold_is_one():
    (score,) = jump_of_loss(4.0, first=-4.1, deviations=1.0)
    (equal,) = jump_of_loss(4.0, first=-4.1, deviations=score.value)
    (below,) = jump_of_loss(4.0, first=-4.1, deviations=score.value * 1.001)
    assert equal.value == 1.0
    assert [found.at_most for found in (score, equal, below)] == ["info", "info", "error"]


@pytest.mark.parametrize(
    ("name", "count", "values"),
    [
        ("diverges", 21, {"loss": 2.0}),
        ("unbounded_loss", 60, {"loss": -2.0}),
        ("plateau", 320, {"loss": 2.0}),
        ("scaler_skips", 100, {"step_skipped": 0.0}),
    ],
)
def test_a_rule_has_a_score_from_this_value_on(name, count, values):
    history, rule, numbers = History(NETWORK), rule_named(name), []
    for step in range(count + 1):
        for kind, value in values.items():
            history.add(kind, None, step, value)
        numbers += [step + 1 for _ in rule.scores(history)] if step >= count - 2 else []
    assert numbers == [count, count + 1]


@pytest.mark.parametrize(
    ("deviation", "first", "step", "score"),
    [
        (0.5, 2.5, 0, 2.5 / 2 / math.log(10)),
        (3.0, 5.0, 0, 5.0 / (math.log(10) + 4.5)),  # Jensen's bound
        (3.0, 30.0, 0, 30.0 / (math.log(10) + 4.5)),
        (4.4, 30.0, 0, 30.0 / (math.log(10) + 4.4 * math.sqrt(2 * math.log(10)))),  # the expected maximum
        (9.0, 30.0, 0, 15.0 / math.log(10)),  # larger than any usual scale
        (3.0, 30.0, 1, None),
    ],
)
def test_a_usual_last_layer_explains_a_large_first_loss(deviation, first, step, score):
    """The head has 10 outputs, so that the norm of its weights is the root of 10 times the deviation of the logits."""
    history, rule = History(NETWORK), rule_named("loss_at_init")
    history.add("output_classes", None, step, 10.0)
    for name, norm in (("fc0", 1.0), ("fc1", 1.0), ("head", math.sqrt(10) * deviation)):
        history.add("weights_norm2", name, step, norm)
    history.add("output_cross_entropy", None, step, first)
    found = [(each.value, each.figure) for each in rule.scores(history)]
    assert found == ([] if score is None else [(pytest.approx(score), first / math.log(10))])


@pytest.mark.parametrize(("bound", "at_most"), [(-0.9, "error"), (-1.0, "error"), (-1.01, "info"), (1.01, "error")])
def test_another_term_competes_if_it_has_raised_the_loss_by_more_than_a_guess(bound, at_most):
    history, rule = History(NETWORK), rule_named("no_learning")
    for step in range(0, 400, 10):
        for (kind, name), value in lowered(bound * GUESS, 1).items():
            if (number := value(step)) is not None:
                history.add(kind, name, step, number)
        found = [*rule.scores(history)]
    assert [(score.at_most, score.figure) for score in found] == [(at_most, pytest.approx(0.95))]


def without_gradient(*names, missing=("activations_variance",), then=None):
    """Return series of weights that are updated, of which some have no gradient until sample `then`."""
    kinds = {"weight_updates_norm2", "activations_variance", "weight_gradients_norm2"} - set(missing)
    series = {(kind, name): sampled([1.0]) for kind in kinds for name in LAYERS}
    for name in names:
        del series["weight_gradients_norm2", name]
        if then is not None:
            series["weight_gradients_norm2", name] = sampled([None] * then + [1.0])
    return series


@pytest.mark.parametrize(
    ("series", "samples", "steps"),
    [
        # from the input up to one layer, of modules that are known to be called: at once
        (without_gradient("fc0", missing=()), 1, {"fc0": 0}),
        (without_gradient("fc0", "fc1", missing=()), 1, {"fc0": 0, "fc1": 0}),
        # others after 3 samples
        (without_gradient("fc1", missing=()), 2, {}),
        (without_gradient("fc1", missing=()), 3, {"fc1": 0}),
        (without_gradient("fc0"), 2, {}),
        (without_gradient("fc0"), 3, {"fc0": 0}),
        (without_gradient("fc0"), 5, {"fc0": 0}),
        (without_gradient("fc0", then=2), 4, {}),
        (without_gradient(missing=()), 3, {}),
        # what is frozen, not called, or has no update
        (without_gradient("fc0", missing=()) | {("weight_requires_grad", "fc0"): sampled([0.0])}, 3, {}),
        (without_gradient("fc0", missing=()) | {("weight_requires_grad", "fc0"): sampled([1.0])}, 3, {"fc0": 0}),
        (without_gradient("fc0") | {("activations_variance", "fc0"): sampled([1.0])}, 3, {"fc0": 0}),
        (without_gradient("fc0") | {("activations_variance", "fc1"): sampled([1.0])}, 3, {}),
        ({key: value for key, value in without_gradient("fc0").items() if key[1] != "fc0"}, 3, {}),
        # no sample of gradients
        (without_gradient(*LAYERS, missing=()), 3, {}),
    ],
)
def test_a_weight_without_a_gradient(series, samples, steps):
    history, rule = History(NETWORK), rule_named("no_gradient")
    for step in range(0, 10 * samples, 10):
        for (kind, name), value in series.items():
            if (number := value(step)) is not None:
                history.add(kind, name, step, number)
        found = [*rule.scores(history)]
    assert {score.module: score.step for score in found if score.value == 1.0} == steps
    assert {score.value for score in found} <= {0.0, 1.0}
    assert all(score.figure == 0.0 for score in found)


@pytest.mark.parametrize(
    ("classes", "scales", "ratios"),
    [
        (None, {"fc0": 3.0, "head": 0.5}, {"fc0": 6.0, "fc1": 2.0}),
        (10.0, {"fc0": 3.0, "head": 0.5}, {"fc0": 6.0, "fc1": 2.0}),
        (100.0, {"fc0": 3.0, "fc1": 0.5}, {"fc0": 6.0, "head": 2.0}),  # the last with a row for each class
        (7.0, {"fc0": 3.0, "head": 0.5}, {"fc0": 6.0, "fc1": 2.0}),
    ],
)
def test_gradients_are_compared_with_those_of_the_last_matrix_of_classes(classes, scales, ratios):
    history, rule = History(NETWORK), rule_named("exploding_gradient")
    for step, expected in ((0, ratios), (10, {})):
        for (kind, name), value in gradients(**scales).items():
            history.add(kind, name, step, value(0))
        if classes is not None:
            history.add("output_classes", None, step, classes)
        found = {score.module: (score.value, score.figure) for score in rule.scores(history)}
        assert found == {name: (pytest.approx(ratio / 100), pytest.approx(ratio)) for name, ratio in expected.items()}


def test_what_is_usual_for_gradients_are_twenty_samples_before_the_last_two():
    """Eleven of these twenty are 2."""
    history, rule = History(NETWORK), rule_named("gradient_spike")
    for step, norm in enumerate([900.0] * 20 + [2.0] * 11 + [900.0, 120.0]):
        for name in LAYERS:
            history.add("weight_gradients_norm2", name, step, norm)
    (score,) = rule.scores(history)
    assert (score.value, score.figure) == (pytest.approx(math.log(60) / math.log(30)), pytest.approx(60.0))


def test_the_figure_of_a_gradient_that_is_zero_is_0():
    history, rule = History(NETWORK), rule_named("zero_gradient")
    for name, norm in (("fc0", 1.0), ("fc1", 0.0), ("head", 1.0)):
        history.add("weight_gradients_norm2", name, 0, norm)
    assert [(score.module, score.value, score.figure) for score in rule.scores(history)] == [
        ("fc0", 0.0, 0.0),
        ("fc1", 1.0, 0.0),
        ("head", 0.0, 0.0),
    ]


def test_the_figure_of_a_loss_without_a_bound_is_its_level():
    history, rule = History(NETWORK), rule_named("unbounded_loss")
    for step in range(291):
        history.add(
            "loss", None, step, 1.0 if step < 20 else {4: -10.0, 5: -30.0, 6: -200.0}.get((step + 40) // 48, 0.0)
        )
    assert [score.figure for score in rule.scores(history)] == [-200.0]
