"""Each rule by itself, on series: it finds the mistake, and nothing in the healthy run that is most similar."""

import math

import pytest

from ikkuna.diagnosis import Judge, Network, get_rules
from ikkuna.store.values import ModuleEntry
from tests.diagnosis.rows import HELD_OUT, LAYERS, NETWORK, ROWS, classification, constant, layers, sampled


def findings(rule, series, steps=400, held_out=None):
    judge = Judge([rule], NETWORK)
    for step in range(steps):
        for (kind, name), value in series.items():
            if (number := value(step)) is not None:
                judge.add(kind, name, step, number)
        judge.finish_step(step)
        for kind, value in (held_out or {}).items():
            if (number := value(step)) is not None:
                judge.add(kind, None, step, number, "testing")
        judge.finish_step(step)
    return judge.findings


def rule_named(name):
    return next(rule for rule in get_rules("all") if rule.name == name)


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_finds_its_mistake(name):
    assert [finding.rule for finding in findings(rule_named(name), ROWS[name][0])] == [name]


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_finds_nothing_in_a_similar_healthy_run(name):
    assert not findings(rule_named(name), ROWS[name][1])


@pytest.mark.parametrize("created_again", [True, False])
def test_an_optimizer_of_each_step_is_seen_in_successive_samples(created_again):
    """A new optimizer has counted one step; the samples of a rule are blocks of four steps."""

    def counted(step):
        return (1.0 if created_again else step + 1.0) if step % 10 < 4 else None

    found = findings(rule_named("optimizer_reset"), {("weight_state_step_mean", "fc0"): counted}, steps=60)
    assert bool(found) == created_again


def test_a_scaler_that_skips_single_steps_is_no_new_optimizer():
    skipped = {20, 21, 22, 40, 41}
    counts = {("weight_state_step_mean", "fc0"): lambda step: step + 1.0 - sum(each <= step for each in skipped)}
    assert not findings(rule_named("optimizer_reset"), counts, steps=60)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([2.0, 8.0, 900.0, math.nan], "had grown from 2 to 900"),
        ([2.0, 1.8, 1.7, math.nan], "has not grown"),
        ([math.nan], "no weight was found"),
        ([2.0, 8.0, 9.0, math.nan], "no weight was found"),
    ],
)
def test_the_losses_before_a_nan_say_where_to_look(losses, words):
    series = {
        ("loss", None): lambda step: losses[step],
        ("weights_norm2", "fc0"): lambda step: 1.0 if not step else None,
    }
    (finding,) = findings(rule_named("nonfinite"), series, steps=len(losses))
    assert words in finding.message


GRADIENT = {("weights_norm2", "fc0"): sampled([1.0]), ("weight_gradients_norm2", "fc0"): sampled([math.nan])}


@pytest.mark.parametrize(
    ("more", "words", "advice"),
    [
        ({("loss", None): sampled([2.0])}, "weights and outputs are finite", "derivative"),
        ({("activations_variance", "fc0"): sampled([1.0])}, "weights and outputs are finite", "derivative"),
        ({("loss", None): lambda step: None if step else math.nan}, "It is the loss", ""),
        ({}, "outputs were not measured", "missing values"),
    ],
)
def test_a_gradient_is_blamed_on_what_was_seen_of_its_step(more, words, advice):
    (finding,) = findings(rule_named("nonfinite"), GRADIENT | more, steps=1)
    assert words in finding.message
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("steps", "rates", "updates", "found"),
    [
        (20, [0.0], [0.0], 0),
        (21, [0.0], [0.0], 1),
        (100, [0.1], [0.0], 0),  # rounding may explain it for longer
        (61, [0.0, 0.1], [0.0, 1.0], 0),  # a warm-up
    ],
)
def test_a_learning_rate_of_0_is_a_mistake_after_20_steps(steps, rates, updates, found):
    series = layers("weight_gradients_norm2") | {("learning_rate", "0"): sampled(rates)}
    series |= dict.fromkeys((("weight_updates_norm2", name) for name in LAYERS), sampled(updates))
    seen = findings(rule_named("never_moves"), series, steps=steps)
    assert len(seen) == found
    assert all("learning rate is 0" in finding.message and "schedule" in finding.advice for finding in seen)


def test_a_loss_of_0_since_the_first_step_is_said():
    series = ROWS["all_gradients_zero"][0] | {("loss", None): lambda step: 0.0}
    (finding,) = findings(rule_named("all_gradients_zero"), series)
    assert "since the first step" in finding.message
    assert "itself" in finding.advice


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_rule_compares_training_with_held_out_data(name):
    series, worse, better = HELD_OUT[name]
    assert [finding.rule for finding in findings(rule_named(name), series, held_out=worse)] == [name]
    assert not findings(rule_named(name), series, held_out=better)


def test_every_installed_rule_has_a_row():
    ours = {rule.name for rule in get_rules("all") if type(rule).__module__.startswith("ikkuna_subscribers.")}
    assert ours == {*ROWS, *HELD_OUT}


@pytest.mark.parametrize("name", ["loss_at_init", "signal_scale", "signal_lost", "exploding_gradient", "lr_too_high"])
def test_rules_of_the_first_step_are_silent_in_a_resumed_run(name):
    """The first step of a resumed run is not that of the training."""
    series = ROWS[name][0]
    judge = Judge([rule_named(name)], NETWORK)
    for step in range(100, 300):
        for (kind, series_name), value in series.items():
            if (number := value(step)) is not None:
                judge.add(kind, series_name, step, number)
        judge.finish_step(step)
    assert not judge.findings


@pytest.mark.parametrize("name", sorted({*ROWS}))
def test_a_healthy_run_at_another_scale_stays_healthy(name):
    """A rule about gradients and updates is relative: a loss that is a thousand times as large changes nothing."""
    kinds = ("weight_gradients_norm2", "weight_micro_gradients_norm2", "weight_updates_norm2")
    if name == "nonfinite" or not all(kind in kinds for kind in rule_named(name).needs):
        return
    scaled = {
        key: (lambda step, value=value: None if value(step) is None else 1e3 * value(step))
        for key, value in ROWS[name][1].items()
    }
    assert not findings(rule_named(name), scaled)
    worse = {
        key: (lambda step, value=value: None if value(step) is None else 1e3 * value(step))
        for key, value in ROWS[name][0].items()
    }
    assert findings(rule_named(name), worse)


def first_findings(name, network, series):
    """Return the findings of a rule at the first step."""
    judge = Judge([rule_named(name)], network)
    for (kind, series_name), value in series.items():
        judge.add(kind, series_name, 0, value)
    return judge.finish_step(0)


@pytest.mark.parametrize(("scale", "is_found"), [(1.0, False), (3.0, True)])
def test_a_head_that_is_scaled_by_its_outputs_explains_the_first_loss(scale, is_found):
    """Its weights have a variance of 1/(number of classes); larger ones are a mistake."""
    network = Network([ModuleEntry("head", "Linear", (("weight", (10, 1000)),))])
    norm = scale * math.sqrt(10 * 1000 / 10)
    series = {("weights_norm2", "head"): norm, ("output_classes", None): 10.0, ("output_cross_entropy", None): 12.0}
    assert bool(first_findings("loss_at_init", network, series)) == is_found


@pytest.mark.parametrize(("classes", "is_found"), [(10.0, False), (7.0, True)])
def test_a_branch_with_a_small_scale_is_not_the_last_layer(classes, is_found):
    """The branch is registered last; it counts as the last layer if no matrix has a row for each class."""
    entries = [("first", (64, 20)), ("head", (10, 64)), ("branch", (64, 64))]
    network = Network([ModuleEntry(name, "Linear", (("weight", shape),)) for name, shape in entries])
    series = {("weights_norm2", name): 1.0 for name, _ in entries} | {("output_classes", None): classes}
    series |= {("weight_gradients_norm2", name): 1e-4 if name == "branch" else 1.0 for name, _ in entries}
    assert bool(first_findings("exploding_gradient", network, series)) == is_found


@pytest.mark.parametrize(("variance", "severity"), [(0.0, "warning"), (60.0, "info")])
def test_a_falling_loss_does_not_excuse_batches_of_one_class_each(variance, severity):
    """They are fitted one after another; where most of the variance is within the batches, the loss is one of all classes."""
    series = classification(label_mean=sampled([0.0] * 12 + [9.0] * 12), label_variance=variance)
    (finding,) = findings(rule_named("not_shuffled"), series, 400)
    assert finding.severity == severity


@pytest.mark.parametrize(("classes", "is_found"), [([10.0, 10.0], True), ([10.0, 2.0], False)])
def test_labels_of_tasks_that_take_turns_are_not_compared_with_each_other(classes, is_found):
    turns = {"label_mean": [4.5, 0.5], "label_variance": [8.0, 0.25], "output_classes": classes}
    series = classification(**{kind: sampled(values * 30) for kind, values in turns.items()})
    assert bool(findings(rule_named("not_shuffled"), series, 600)) == is_found


COMPETING = {("loss_change_bound", None): sampled([-2.0])}


@pytest.mark.parametrize(("bounds", "severity"), [({}, "warning"), (COMPETING, "info")])
def test_a_jump_of_a_loss_that_something_else_raises_is_an_info(bounds, severity):
    """The weights have lowered the loss by 2 in each sample, and it stays where it is."""
    series = {("loss", None): lambda step: 30.0 if step == 255 else 2.0 + 0.01 * (step % 3)} | bounds
    (finding,) = findings(rule_named("loss_spike"), series)
    assert finding.severity == severity


@pytest.mark.parametrize(("bound", "severity"), [(0.0, "warning"), (-0.01, "warning"), (-2.0, "info")])
def test_targets_that_raise_the_loss_by_more_than_that_of_a_constant_are_an_info(bound, severity):
    """As in Q-learning with a rare reward: the targets are those of a network."""
    series = ROWS["no_better_than_constant"][0] | constant(loss=2.0) | {("loss_change_bound", None): sampled([bound])}
    (finding,) = findings(rule_named("no_better_than_constant"), series)
    assert finding.severity == severity


@pytest.mark.parametrize(("kept", "is_found"), [(None, True), (1.0, True), (0.0, False)])
def test_gradients_that_were_cleared_before_the_backward_are_only_changed(kept, is_found):
    series = ROWS["not_zeroed"][0] | ({} if kept is None else constant(gradients_kept=kept))
    assert bool(findings(rule_named("not_zeroed"), series)) == is_found


@pytest.mark.parametrize(
    ("ages", "is_found"), [([0.0, 60.0, 60.0, 60.0], True), ([0.0, 60.0, 90.0, 40.0, 70.0, 20.0], False)]
)
def test_batches_that_are_drawn_again_at_random_have_no_order(ages, is_found):
    series = {("input_batch_age", None): sampled(ages)}
    assert bool(findings(rule_named("same_order"), series, 10 * len(ages))) == is_found


def counted(values):
    return {("weight_state_step_mean", name): sampled(values) for name in LAYERS}


FROM_START = [1.0, 2.0, 3.0, 1.0, 2.1, 3.1, 1.0, 2.2, 3.2, 1.0, 2.3, 3.3]
OUTER_LOOP = [1.0, 2.0, 1.0, 3.0, 1.1, 2.1, 1.1, 3.1, 1.2, 2.2, 1.2, 3.2, 4.0]


@pytest.mark.parametrize(
    ("norms", "counts", "severity"),
    [
        (FROM_START, {}, "error"),
        (FROM_START, counted([float(10 * i + 1) for i in range(12)]), "error"),
        (FROM_START, counted([1.0, 11.0, 21.0] * 4), "info"),  # the optimizer is new as well, as in a cross-validation
        ([0.5, *FROM_START], counted([1.0, 11.0, 21.0] * 5), "error"),  # not the first weights
        (OUTER_LOOP, {}, "info"),
    ],
)
def test_weights_that_are_restored_on_purpose_are_an_info(norms, counts, severity):
    series = {("weights_norm2", name): sampled(norms) for name in LAYERS} | counts
    (finding,) = findings(rule_named("weights_restored"), series, 130)
    assert finding.severity == severity


@pytest.mark.parametrize("norm", ["LayerNorm", "BatchNorm1d", "LlamaRMSNorm", None])
def test_a_large_signal_in_front_of_a_normalisation_is_no_finding(norm):
    behind = [ModuleEntry("norm", norm)] if norm else []
    network = Network([ModuleEntry("fc", "Linear", (("weight", (10, 10)),)), *behind])
    assert bool(first_findings("signal_scale", network, {("activations_variance", "fc"): 50.0**2})) == (norm is None)


def test_two_classes_need_one_direction_only():
    series = classification() | layers("activations_dimension", fc0=1.0, fc1=1.0, head=1.0)
    assert not findings(rule_named("rank_collapse"), series | {("output_classes", None): sampled([2.0])})


def test_a_bias_with_a_gradient_is_no_network_without_gradients():
    """Behind a dead layer every weight has a gradient of zero, and the bias of the last layer has one."""
    series = ROWS["all_gradients_zero"][0] | {("bias_gradients_norm2", "head"): sampled([0.1])}
    assert not findings(rule_named("all_gradients_zero"), series)
