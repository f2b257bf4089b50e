"""Checks of what the optimizers own, which need no pass."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.names import common_module, counted, listed
from ikkuna.diagnosis.preflight_checks.trial import Trial

__all__ = ["frozen_in_optimizer", "learning_rate_zero", "not_in_optimizer", "parameter_in_two_groups"]


def not_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find trainable parameters that no optimizer owns, because they will never change."""
    owned = set(map(id, _owned(trial)))
    missing = [name for name, parameter in trial.trainable.items() if id(parameter) not in owned]
    foreign = owned - set(map(id, trial.parameters.values()))
    if not missing:
        return
    share = len(missing) / len(trial.trainable)
    if share == 1 and foreign:
        message = "The optimizer owns other tensors than the parameters of this model."
        advice = "create the optimizer after the model is complete, converted and on its device"
    else:
        message = f"{counted(len(missing), 'trainable parameter')} in no optimizer: {listed(missing)}."
        advice = "pass these parameters to an optimizer, or freeze them with requires_grad_(False)"
    yield Finding("not_in_optimizer", "error", message, common_module(missing), value=share, advice=advice)


def frozen_in_optimizer(trial: Trial) -> Iterator[Finding]:
    """Find parameters of the optimizers that do not require a gradient."""
    owned = set(map(id, _owned(trial)))
    frozen = [name for name, p in trial.parameters.items() if not p.requires_grad and id(p) in owned]
    if frozen:
        message = (
            f"An optimizer owns {counted(len(frozen), 'frozen parameter')}, which will not change: {listed(frozen)}."
        )
        advice = "if they should train, call requires_grad_(True)"
        yield Finding("frozen_in_optimizer", "info", message, common_module(frozen), value=len(frozen), advice=advice)


def parameter_in_two_groups(trial: Trial) -> Iterator[Finding]:
    """Find parameters that are updated more than once a step."""
    counts = Counter(map(id, _owned(trial)))
    twice = [name for name, parameter in trial.parameters.items() if counts[id(parameter)] > 1]
    if twice:
        message = f"{counted(len(twice), 'parameter')} in several parameter groups or optimizers: {listed(twice)}."
        advice = "put each parameter into one group, so that it is updated once a step"
        yield Finding(
            "parameter_in_two_groups", "warning", message, common_module(twice), value=len(twice), advice=advice
        )


def learning_rate_zero(trial: Trial) -> Iterator[Finding]:
    """Find parameter groups with the learning rate 0, except at the start of a schedule."""
    _owned(trial)
    names = {id(parameter): name for name, parameter in trial.parameters.items()}
    for optimizer in trial.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            scheduled = float(group.get("initial_lr", 0.0)) > 0
            if float(group.get("lr", 1.0)) == 0 and not scheduled and any(p.requires_grad for p in group["params"]):
                members = [names[id(p)] for p in group["params"] if id(p) in names]
                message = f"The learning rate of parameter group {number} is 0: {listed(members)}."
                advice = "set a learning rate, or freeze the parameters"
                yield Finding("learning_rate_zero", "error", message, common_module(members), value=0.0, advice=advice)


def _owned(trial: Trial) -> list[nn.Parameter]:
    if not trial.optimizers:
        raise CannotJudgeError("no optimizer was given")
    return [p for optimizer in trial.optimizers for group in optimizer.param_groups for p in group["params"]]
