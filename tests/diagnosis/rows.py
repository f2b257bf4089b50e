"""Series of each rule with its mistake, and of a similar healthy run, for the tests and the documentation."""

import math
import random

from ikkuna.diagnosis import Network
from ikkuna.store.values import ModuleEntry

NETWORK = Network(
    [
        ModuleEntry("fc0", "Linear", (("weight", (100, 100)), ("bias", (100,)))),
        ModuleEntry("act0", "ReLU"),
        ModuleEntry("norm0", "BatchNorm1d", (("weight", (100,)),)),
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
    return 6.0 if step in (150, 151, 152) else falling(step)


def jumping(step):
    return 50.0 if step == 151 else 2 * falling(step)


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
            ("weights_ranks_unequal", "fc1"): sampled([0.0, 0.0, 1.0]),
            ("weights_ranks_unequal_first", "fc1"): sampled([1.0]),
            ("weights_ranks_unequal_last", "fc1"): sampled([1.0]),
        },
        {  # a state that each rank has for itself
            ("weights_ranks_unequal", "fc1"): sampled([0.0]),
            ("weight_state_exp_avg_ranks_unequal", "fc1"): sampled([1.0]),
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
    "no_better_than_constant": (
        layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1e-3, head=1e-3)
        | constant(loss_form=0.0, constant_loss=2.0)
        | {("loss_over_constant", None): lambda step: every(step, 10, 1.02 + 0.01 * NOISE[step])},
        layers("weight_updates_weights_ratio", fc0=1e-3, fc1=1e-3, head=1e-3)
        | constant(loss_form=0.0, constant_loss=2.0)
        | {("loss_over_constant", None): lambda step: every(step, 10, max(1.02 * 0.995**step, 0.85))},
    ),
    "wrong_sign": (
        classification(loss=lambda step: -1.0 - step, output_cross_entropy=lambda step: every(step, 10, 1.0 + step)),
        classification(loss=lambda step: -1.0 - step),  # the logarithm of a density
    ),
    "betas": (
        constant(optimizer_beta1=0.999, optimizer_beta2=0.9),
        constant(optimizer_beta1=0.9, optimizer_beta2=0.8),
    ),
    "epsilon": (
        constant_of("fc0", weight_state_exp_avg_sq_mean=1e-6) | constant(optimizer_epsilon=1.0, optimizer_beta2=0.999),
        {("weight_state_exp_avg_sq_mean", "fc0"): lambda step: every(step, 10, 1e-20 if step > 100 else 1e-6)}
        | constant(optimizer_epsilon=1e-8, optimizer_beta2=0.999),
    ),
    "decay_dominates": (
        layers("weight_updates_weights_ratio", fc0=0.012, fc1=0.012, head=0.012)
        | constant(optimizer_weight_decay=10.0, learning_rate=1e-3),
        layers("weight_updates_weights_ratio", fc0=1e-5, fc1=1e-5, head=1e-5)  # nothing is left to learn
        | constant(optimizer_weight_decay=0.01, learning_rate=1e-3),
    ),
    "schedule_past_end": (
        {("learning_rate", None): lambda step: every(step, 2, 0.05 * (1 + math.cos(math.pi * step / 20)))},
        {("learning_rate", None): lambda step: every(step, 2, 0.1 * abs(step % 40 - 20) / 20)},  # straight lines
    ),
    "gradients_cleared": (
        layers("weight_micro_gradients_norm2")
        | layers("weight_updates_norm2", fc0=0.0, fc1=0.0, head=0.0)
        | constant(gradients_at_step=0.0),
        layers("weight_micro_gradients_norm2")
        | layers("weight_updates_norm2", fc0=0.0, fc1=0.0, head=0.0)  # a learning rate of 0
        | constant(gradients_at_step=4.0),
    ),
    "step_without_gradients": (
        layers("weight_updates_norm2", fc0=0.0, fc1=0.0, head=0.0) | constant(gradients_at_step=0.0),
        layers("weight_updates_norm2") | constant(gradients_at_step=0.0),  # an optimizer that needs none
    ),
    "all_gradients_zero": (
        layers("weight_gradients_norm2", fc0=0.0, fc1=0.0, head=0.0)
        | layers("weight_micro_gradients_norm2", fc0=0.0, fc1=0.0, head=0.0)
        | {("loss", None): falling},
        dict.fromkeys((("weight_gradients_norm2", name) for name in LAYERS), sampled([1.0, 0.0]))
        | dict.fromkeys((("weight_micro_gradients_norm2", name) for name in LAYERS), sampled([1.0, 0.0]))
        | {("loss", None): lambda step: max(1.0 - step, 0.0)},  # a loss with a margin
    ),
    "scaler_bypassed": (
        classification(loss=lambda step: 2.0**16 * falling(step))
        | layers("weight_gradients_norm2")
        | layers("weight_micro_gradients_norm2"),
        classification(loss=lambda step: 2.0**16 * falling(step))  # unscaled by hand
        | layers("weight_gradients_norm2", fc0=2.0**-16, fc1=2.0**-16, head=2.0**-16)
        | layers("weight_micro_gradients_norm2"),
    ),
    "clipped_before_unscaling": (
        layers("weight_micro_gradients_norm2")
        | layers("weight_gradients_norm2", fc0=1e-5, fc1=1e-5, head=1e-5)
        | constant(step_skipped=0.0),
        layers("weight_micro_gradients_norm2")  # a tiny gradient that is not limited
        | {("weight_gradients_norm2", name): lambda step: every(step, 10, 1e-5 + 1e-7 * step) for name in LAYERS}
        | constant(step_skipped=0.0),
    ),
    "weights_restored": (
        {("weights_norm2", name): lambda step: every(step, 10, 5.0 + step % 50) for name in LAYERS},
        {("weights_norm2", name): lambda step: every(step, 10, 5.0 + step // 50) for name in LAYERS},
    ),
    "evaluation_in_training_mode": (
        {("evaluations_in_training_mode", None): lambda step: every(step, 10, float(step // 100))},
        {("evaluations_in_training_mode", None): sampled([0.0, 1.0])},
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
    "gradient_jump": (
        {("gradients_global_norm", None): jumping, ("loss", None): falling},
        {("gradients_global_norm", None): lambda step: 2 * falling(step), ("loss", None): falling},
    ),
    "not_shuffled": (
        classification(label_mean=sorted_labels, label_variance=0.0),
        classification(label_mean=random_labels),
    ),
    "repeated_batch": (
        constant(input_batch_age=10.0, input_batch_repeats=7.0),
        constant(input_batch_age=10.0, input_batch_repeats=0.0),  # an epoch of ten batches
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
    "contradicting_labels": (
        constant(input_rows_contradicted=0.6),
        {("input_rows_contradicted", None): sampled([1.0, 0.0])},
    ),
    "labels_repeated": (
        constant(input_labels_repeats=7.0),
        constant(input_labels_repeats=3.0),
    ),
    "batch_twice": (
        classification(input_batch_repeats=4.0, input_batch_age=0.0),
        classification(input_batch_repeats=30.0, input_batch_age=10.0),  # all data in each step
    ),
    "repeated_backward": (
        layers("weight_micro_gradients_norm2")
        | layers("weight_gradients_norm2", fc0=2**0.5, fc1=2**0.5, head=2**0.5)
        | constant(micro_batches=1.0),
        layers("weight_micro_gradients_norm2")  # different rows in each micro-batch
        | layers("weight_gradients_norm2", fc0=2**0.5, fc1=1.3, head=1.2)
        | constant(micro_batches=2.0),
    ),
    "same_random_numbers": (
        constant(random_numbers_repeated=1.0),
        constant(random_numbers_repeated=0.0),
    ),
    "rate_squared": (
        {("learning_rate", None): lambda step: 9e-6 * 0.999**step, ("optimizer_initial_rate", None): sampled([3e-3])},
        {("learning_rate", None): lambda step: 9e-6 * 1.01**step, ("optimizer_initial_rate", None): sampled([3e-3])},
    ),
    "frozen_statistics": (
        layers("weight_requires_grad", fc0=0.0)
        | {("weight_requires_grad", "norm0"): sampled([0.0])}
        | constant(evaluation_mode=0.0),
        layers("weight_requires_grad", fc0=0.0)
        | {("weight_requires_grad", "norm0"): sampled([0.0])}
        | constant(evaluation_mode=0.2),
    ),
    "unbounded_loss": (
        {("loss", None): lambda step: 1 - 0.02 * step**2 + 0.1 * NOISE[step]},
        {("loss", None): lambda step: 1 - 5 * step + 0.1 * NOISE[step]},  # at a constant pace
    ),
    "same_order": (constant(input_batch_age=120.0), constant(input_batch_age=10.0)),
}
OTHER_UNITS = {"input_rows_mean": 0.13, "input_rows_deviation": 0.3}
AS_IN_TRAINING = {"input_rows_mean": -0.2, "input_rows_deviation": 1.3}
HELD_OUT = {
    "overfit": (
        {("loss", None): falling},
        {"loss": lambda step: every(step, 20, 0.3 + 0.002 * step if step > 60 else 2 - step / 40)},
        {"loss": lambda step: every(step, 20, max(0.3, 2 - step / 40))},
    ),
    "training_rows_evaluated": (
        constant(input_rows_known=1.0),
        {"input_rows_known": lambda step: every(step, 20, 0.2)},
        {"input_rows_known": lambda step: every(step, 20, 0.02)},
    ),
    "evaluation_inputs": (
        constant(input_rows_mean=0.0, input_rows_deviation=1.0),
        {key: lambda step, at=at: every(step, 20, at) for key, at in OTHER_UNITS.items()},
        {key: lambda step, at=at: every(step, 20, at) for key, at in AS_IN_TRAINING.items()},
    ),
}
"""Series of the training, and of held-out data with the mistake and without it."""
