"""The list of checks before the first step."""

from ikkuna.diagnosis.preflight_checks.check import Check
from ikkuna.diagnosis.preflight_checks.dependence import batch_leak, ignores_input, time_leak
from ikkuna.diagnosis.preflight_checks.detached import no_gradient
from ikkuna.diagnosis.preflight_checks.finite import nonfinite
from ikkuna.diagnosis.preflight_checks.inputs import input_scale
from ikkuna.diagnosis.preflight_checks.loss import loss_at_init, loss_scale, softmax_twice
from ikkuna.diagnosis.preflight_checks.modes import eval_mode
from ikkuna.diagnosis.preflight_checks.optimizer import (
    frozen_in_optimizer,
    learning_rate_zero,
    not_in_optimizer,
    parameter_in_two_groups,
)
from ikkuna.diagnosis.preflight_checks.random_output import random_output
from ikkuna.diagnosis.preflight_checks.runs import first_step_runs, label_dtype, label_range, label_shape
from ikkuna.diagnosis.preflight_checks.signal import (
    dead_units,
    gradient_scale,
    identical_units,
    signal_lost,
    signal_scale,
)
from ikkuna.diagnosis.preflight_checks.tied import untied_weights

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *(not_in_optimizer, frozen_in_optimizer, parameter_in_two_groups, learning_rate_zero),
    *(eval_mode, untied_weights, identical_units, input_scale, nonfinite),
    *(first_step_runs, label_range, label_dtype, label_shape, loss_at_init, loss_scale, softmax_twice),
    *(no_gradient, signal_scale, signal_lost, gradient_scale, dead_units),
    *(ignores_input, batch_leak, time_leak, random_output),
)
