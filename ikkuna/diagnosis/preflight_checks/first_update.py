"""The first step of the optimizers, on a copy: what the gradient says of the loss, and what the loss does."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.support.failures import error_text
from ikkuna.support.undisturbed import run_model

_MOST_PARAMETERS = 20_000_000


class FirstUpdate(NamedTuple):
    """The change of the loss of one batch by the first step of the optimizers.

    Parameters
    ----------
    predicted : float
        The product of the gradient before the step and the step.
    change : float
        What the loss of the same batch, with the same random numbers, has changed by.
    """

    predicted: float
    change: float

    @property
    def overshoots(self) -> bool:
        """Whether the step goes beyond the minimum along its direction, or upwards.

        Along a line a quadratic function has fallen by half of the prediction at its minimum.
        """
        return not self.change <= self.predicted / 2 <= 0


def first_update(trial: Trial) -> FirstUpdate:
    """Return what the first step of the optimizers does to the loss of the batch; copies of the model and of them make it.

    Raises
    ------
    CannotJudgeError
        If there is no optimizer, if the loss has no gradient, if something cannot be copied, or if a step needs a closure.
    """
    if not trial.optimizers:
        raise CannotJudgeError("no optimizer was given")
    if not trial.first_step.has_gradient or trial.loss_value.numel() != 1:
        raise CannotJudgeError("the loss has no gradient")
    if sum(parameter.numel() for parameter in trial.trainable.values()) > _MOST_PARAMETERS:
        raise CannotJudgeError(f"the model has more than {_MOST_PARAMETERS:,} parameters")
    try:
        model, loss, optimizers = copy.deepcopy((trial.model, trial.loss, trial.optimizers))
        moved = Trial(model, trial.batch, loss, optimizers)
        parameters = [*moved.trainable.values()]
        before = [parameter.detach().clone() for parameter in parameters]
        value, gradients = _loss_and_gradients(moved, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.random.fork_rng(devices=()):
            for optimizer in optimizers:
                optimizer.step()
        after, _ = _loss_and_gradients(moved, [])
    except Exception as error:
        raise CannotJudgeError(f"a copy cannot make the first step: {error_text(error)}"[:200]) from error
    steps = [(p.detach() - old, g) for p, old, g in zip(parameters, before, gradients, strict=True) if g is not None]
    return FirstUpdate(sum(float((step.double() * g.double()).sum()) for step, g in steps), after - value)


def _loss_and_gradients(trial: Trial, parameters: list[nn.Parameter]) -> tuple[float, tuple[Tensor | None, ...]]:
    """Return the loss of the batch, each time with the same random numbers, and its gradients."""
    with trial.running(as_training=True, autograd=True):
        loss = trial.loss_of_result(run_model(trial.model, trial.batch.copy().inputs))
        gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True) if parameters else ()
    return float(loss), gradients
