"""Each rule by itself, on series: it finds the mistake, and nothing in the healthy run that is most similar."""

import math
import random

import pytest

from ikkuna.diagnosis import Judge, Network, get_rules
from ikkuna.visualization.module_table import ModuleEntry

NETWORK = Network(
    [
        ModuleEntry("fc0", "Linear", (("weight", (100, 100)), ("bias", (100,)))),
        ModuleEntry("act0", "ReLU"),
        ModuleEntry("tanh0", "Tanh"),
        ModuleEntry("fc1", "Linear", (("weight", (100, 100)),)),
        ModuleEntry("drop", "Dropout"),
        ModuleEntry("head", "Linear", (("weight", (10, 100)),)),
    ]
)
DRAW = random.Random(0)
NOISE = [DRAW.gauss(0, 1) for _ in range(1000)]
LAYERS = ("fc0", "fc1", "head")


def every(step, number, value):
    """Return a value at every `number`-th step."""
    return value if step % number == 0 else None


def falling(step):
    return 2.3 * 0.99**step + 0.02 * abs(NOISE[step])


def sampled(values):
    """Return a function of the step with the values of the samples 0, 10, 20 and so on; the last one is repeated."""
    return lambda step: values[min(step // 10, len(values) - 1)] if step % 10 == 0 else None


def layers(kind, **values):
    """Return one series for each layer; 1.0 by default."""
    return {(kind, name): sampled([values[name]]) if name in values else sampled([1.0]) for name in LAYERS}


def constant(**values):
    return {(kind, None): sampled([value]) for kind, value in values.items()}


def constant_of(name, **values):
    return {(kind, name): sampled([value]) for kind, value in values.items()}


def classification(**values):
    """Return figures of a healthy classifier of 10 classes, with other values for some."""
    healthy = {
        "output_dependence": 0.5,
        "output_classes": 10.0,
        "output_is_probability": 0.0,
        "output_magnitude": 3.0,
        "output_log_normalizer": 3.0,
        "prediction_entropy": 2.0,
        "label_entropy": 2.1,
        "label_mean": 4.5,
        "label_variance": 8.0,
        "label_count": 32.0,
    }
    return {
        ("loss", None): falling,
        ("output_cross_entropy", None): lambda step: every(step, 10, falling(step)),
        **{(kind, None): sampled([value]) for kind, value in healthy.items()},
        **{(kind, None): value if callable(value) else sampled([value]) for kind, value in values.items()},
    }


def binary(**values):
    """Return figures of a healthy network with labels between 0 and 1, with other values for some."""
    healthy = {"output_in_unit_interval": 0.0, "output_magnitude": 3.0}
    return {
        ("loss", None): falling,
        ("output_binary_cross_entropy", None): lambda step: every(step, 10, falling(step)),
        **{
            (kind, None): value if callable(value) else sampled([value])
            for kind, value in {**healthy, **values}.items()
        },
    }


def sorted_labels(step):
    return every(step, 10, float(step // 40 % 10))


def random_labels(step):
    return every(step, 10, 4.5 + 0.5 * NOISE[step])


def spiking(step):
    return 3.0 if step in (150, 151, 152) else falling(step)


def at_a_guess(step):
    return 2.3 + 0.01 * NOISE[step]


def diverging(step):
    return 2.3 * 1.02**step


ROWS = {  # rule → the series of a run with the mistake, and of a healthy run that is similar
    "not_in_optimizer": (
        {("unowned_parameters", None): sampled([1.0]), ("unowned_parameters", "fc1"): sampled([1.0])},
        {("unowned_parameters", None): sampled([0.0])},
    ),
    "no_gradient": (
        layers("weight_updates_norm2") | {("weight_gradients_norm2", "head"): sampled([1.0])},
        layers("weight_updates_norm2") | layers("weight_gradients_norm2"),
    ),
    "zero_gradient": (layers("weight_gradients_norm2", fc0=0.0), layers("weight_gradients_norm2", fc0=1e-3)),
    "never_moves": (
        layers("weight_gradients_norm2") | layers("weight_updates_norm2", fc1=0.0),
        layers("weight_gradients_norm2", fc1=0.0) | layers("weight_updates_norm2", fc1=0.0),
    ),
    "lost_updates": (
        layers("weight_gradients_sparsity", fc0=0.1, fc1=0.0, head=0.0)
        | layers("weight_updates_sparsity", fc0=0.95, fc1=0.9, head=0.9),
        layers("weight_gradients_sparsity", fc0=0.8, fc1=0.8, head=0.8)
        | layers("weight_updates_sparsity", fc0=0.8, fc1=0.8, head=0.8),
    ),
    "frozen_inside": (layers("weight_requires_grad", fc1=0.0), layers("weight_requires_grad", fc0=0.0)),
    "evaluation_mode": (constant(evaluation_mode=1.0), constant(evaluation_mode=0.5)),
    "loss_at_init": (
        classification(output_cross_entropy=lambda step: every(step, 10, 8.0 * 0.9**step + 1)),
        classification(output_cross_entropy=lambda step: every(step, 10, 3.0)),
    ),
    "loss_scale": (classification(loss=lambda step: 32 * falling(step)), classification(loss=falling)),
    "softmax_twice": (classification(output_is_probability=1.0), classification()),
    "sigmoid_twice": (
        binary(output_in_unit_interval=1.0, output_magnitude=0.99),
        binary(output_in_unit_interval=1.0, output_magnitude=0.6),  # logits of a label that is likely
    ),
    "running_statistics": (
        constant_of("norm0", running_mean_distance=0.2, running_variance_distance=3.0),
        constant_of("norm0", running_mean_distance=0.2, running_variance_distance=0.3),
    ),
    "attention_collapse": (
        {("attention_evenness", f"fc0:head_{i}"): sampled([0.9, 0.5, 0.01]) for i in range(4)},
        {("attention_evenness", f"fc0:head_{i}"): sampled([0.9, 0.5, 0.01 if i == 0 else 0.3]) for i in range(4)},
    ),
    "idle_experts": (
        constant_of("fc0", dead_experts=0.75),
        constant_of("fc0", dead_experts=0.25),
    ),
    "ranks_differ": (
        {
            ("weights_ranks_norm2_min", "fc1"): sampled([2.0, 2.0, 1.99]),
            ("weights_ranks_norm2_max", "fc1"): sampled([2.0]),
        },
        {  # shards
            ("weights_ranks_norm2_min", "fc1"): sampled([1.0, 1.1, 1.2]),
            ("weights_ranks_norm2_max", "fc1"): sampled([2.0]),
        },
    ),
    "input_scale": (
        constant(input_data_mean=80.0, input_data_variance=70.0**2),
        constant(input_data_mean=0.5, input_data_variance=1.0),
    ),
    "signal_scale": (layers("activations_variance", fc1=50.0**2), layers("activations_variance", fc1=10.0**2)),
    "signal_lost": (classification(output_dependence=1e-9), classification(output_dependence=1e-3)),
    "not_zeroed": (
        layers("weight_micro_gradients_norm2")
        | {("weight_gradients_norm2", name): lambda step: every(step, 10, 1.0 + step) for name in LAYERS},
        layers("weight_micro_gradients_norm2")
        | layers("weight_gradients_norm2", fc0=8.0, fc1=8.0, head=8.0),  # 8 micro-batches
    ),
    "clipped_hard": (
        layers("weight_micro_gradients_norm2") | layers("weight_gradients_norm2", fc0=1e-3, fc1=1e-3, head=1e-3),
        layers("weight_micro_gradients_norm2") | layers("weight_gradients_norm2", fc0=0.1, fc1=0.1, head=0.1),
    ),
    "nonfinite": (layers("weights_norm2", fc1=math.nan), layers("weights_norm2", fc1=1e30)),
    "diverges": ({("loss", None): diverging}, {("loss", None): falling}),
    "loss_spike": ({("loss", None): spiking}, {("loss", None): falling}),
    "lr_too_high": (
        layers("weight_updates_weights_ratio", fc0=2.0, fc1=2.0, head=0.5),
        layers("weight_updates_weights_ratio", fc0=0.1, fc1=0.1, head=2.0),
    ),
    "lr_too_low": (
        classification(loss=at_a_guess, output_cross_entropy=lambda step: every(step, 10, at_a_guess(step)))
        | layers("weight_updates_weights_ratio", fc0=1e-6, fc1=1e-6, head=1e-6),
        classification() | layers("weight_updates_weights_ratio", fc0=1e-6, fc1=1e-6, head=1e-6),
    ),
    "lr_vanished": (
        {("learning_rate", None): lambda step: 0.1 * 0.8**step},
        {("learning_rate", None): lambda step: 0.1 * 0.5 * (1 + math.cos(math.pi * step / 400))},
    ),
    "no_learning": (
        classification(loss=at_a_guess, output_cross_entropy=lambda step: every(step, 10, at_a_guess(step)))
        | layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1e-3, head=1e-3),
        classification() | layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1e-3, head=1e-3),
    ),
    "dead_units": (
        {("activations_dead", "act0"): sampled([0.97])},
        {("activations_dead", "act0"): sampled([0.97, 0.97, 0.5])},
    ),
    "saturated": (
        {
            ("activations_mean", "tanh0"): sampled([0.0]),
            ("activations_variance", "tanh0"): sampled([0.97]),
            ("activations_mean", "head"): sampled([0.0]),
        },
        {
            ("activations_mean", "tanh0"): sampled([0.0]),
            ("activations_variance", "tanh0"): sampled([0.6]),
            ("activations_mean", "head"): sampled([0.0]),
        },
    ),
    "vanishing_gradient": (layers("weight_gradients_norm2", fc0=1e-6), layers("weight_gradients_norm2", fc0=0.01)),
    "exploding_gradient": (layers("weight_gradients_norm2", fc0=1e4), layers("weight_gradients_norm2", fc0=10.0)),
    "gradient_spike": (
        {("weight_gradients_norm2", name): sampled([1.0] * 16 + [100.0] * 9) for name in LAYERS},
        {("weight_gradients_norm2", name): sampled([1.0] * 16 + [100.0] + [1.0] * 9) for name in LAYERS},
    ),
    "not_shuffled": (
        classification(label_mean=sorted_labels, label_variance=0.0),
        classification(label_mean=random_labels),
    ),
    "repeated_batch": (
        constant(input_data_mean=0.1, input_data_variance=1.0),
        {
            ("input_data_mean", None): lambda step: every(step, 10, 0.1 * NOISE[step]),
            ("input_data_variance", None): sampled([1.0]),
        },
    ),
    "ignores_input": (classification(output_dependence=1e-6), classification(output_dependence=0.01)),
    "class_collapse": (
        classification(
            prediction_entropy=0.0, output_cross_entropy=lambda step: every(step, 10, 4.0 + 0.1 * NOISE[step])
        ),
        classification(prediction_entropy=0.0),  # while the loss falls
    ),
    "one_label": (
        classification(label_mean=3.0, label_variance=0.0),
        classification(label_mean=sorted_labels, label_variance=0.0),
    ),
    "weight_decay": (
        {("weights_norm2", name): lambda step: every(step, 10, 5.0 * 0.98**step) for name in LAYERS},
        {("weights_norm2", name): lambda step: every(step, 10, 5.0 * 0.999**step) for name in LAYERS},
    ),
    "scaler_skips": (
        {("step_skipped", None): lambda step: float(step % 3 == 0)},
        {("step_skipped", None): lambda step: float(step < 20 or step % 100 == 0)},
    ),
    "optimizer_reset": (
        {("weight_state_step_mean", "fc0"): sampled([1.0])},
        {("weight_state_step_mean", "fc0"): lambda step: every(step, 10, step + 1.0)},
    ),
    "logit_growth": (
        classification(output_log_normalizer=lambda step: every(step, 10, 1.0 * step)),
        classification(output_log_normalizer=12.0),
    ),
    "update_ratio": (
        layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1.5, head=1e-3),
        layers("weight_updates_weights_ratio", fc0=1e-3, fc1=0.02, head=1e-3),
    ),
    "untied_weights": (constant_of("head", untied_weights=1.0), constant_of("head", untied_weights=0.0)),
    "overloaded_experts": (constant_of("fc1", window_load_max=5.0), constant_of("fc1", window_load_max=2.0)),
    "rank_collapse": (
        classification() | layers("activations_dimension", fc1=1.0, fc0=5.0, head=5.0),
        classification() | layers("activations_dimension", fc1=1.3, fc0=5.0, head=5.0),
    ),
    "plateau": (
        {("loss", None): at_a_guess},
        {("loss", None): falling},
    ),
}
HELD_OUT = {
    "overfit": (
        lambda step: every(step, 20, 0.3 + 0.002 * step if step > 60 else 2 - step / 40),
        lambda step: every(step, 20, max(0.3, 2 - step / 40)),
    )
}


def findings(rule, series, steps=400, held_out=None):
    judge = Judge([rule], NETWORK)
    for step in range(steps):
        for (kind, name), value in series.items():
            if (number := value(step)) is not None:
                judge.add(kind, name, step, number)
        judge.finish_step(step)
        if held_out is not None and (number := held_out(step)) is not None:
            judge.add("loss", None, step, number, "testing")
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


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_rule_compares_training_with_held_out_data(name):
    worse, better = HELD_OUT[name]
    series = {("loss", None): falling}
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


@pytest.mark.parametrize("norm", ["LayerNorm", "BatchNorm1d", "LlamaRMSNorm", None])
def test_a_large_signal_in_front_of_a_normalisation_is_no_finding(norm):
    behind = [ModuleEntry("norm", norm)] if norm else []
    network = Network([ModuleEntry("fc", "Linear", (("weight", (10, 10)),)), *behind])
    assert bool(first_findings("signal_scale", network, {("activations_variance", "fc"): 50.0**2})) == (norm is None)


def test_two_classes_need_one_direction_only():
    series = classification() | layers("activations_dimension", fc0=1.0, fc1=1.0, head=1.0)
    assert not findings(rule_named("rank_collapse"), series | {("output_classes", None): sampled([2.0])})
