"""Check of parameters that the backward pass does not reach."""

from collections.abc import Iterator

from torch import nn

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.names import common_module, counted, listed, module_of
from ikkuna.diagnosis.preflight_checks.perturbed import perturbed_loss
from ikkuna.diagnosis.preflight_checks.trial import Trial

__all__ = ["no_gradient"]

_MOST_FORWARDS = 12


def no_gradient(trial: Trial) -> Iterator[Finding]:
    """Find trainable parameters without a gradient on which the loss depends, and those on which it does not.

    Noise on the parameters of one module at a time, from the last module to the first one, shows which is next to the
    cut.  These passes run only if there are parameters without a gradient.
    """
    if trial.parameters and not trial.trainable:
        message = "No parameter is trainable."
        advice = "call requires_grad_(True) on the parameters that should train"
        yield Finding("no_gradient", "error", message, advice=advice)
        return
    if trial.first_step.loss is not None and not trial.first_step.has_gradient:
        message = "The loss has no gradient: something between parameters and loss detaches it."
        advice = "look for no_grad(), detach(), .item(), .data, argmax or numpy between model and loss"
        yield Finding("no_gradient", "error", message, advice=advice)
        return
    missing = [name for name, gradient in trial.gradients.items() if gradient is None]
    if not missing:
        return
    cut = _next_to_the_cut(trial, missing)
    if cut is None:
        message = f"The loss does not depend on {counted(len(missing), 'trainable parameter')}: {listed(missing)}."
        advice = "freeze or remove them; DistributedDataParallel needs find_unused_parameters=True"
        yield Finding("no_gradient", "info", message, common_module(missing), value=len(missing), advice=advice)
    else:
        message = f"{counted(len(missing), 'trainable parameter')} up to {cut} get no gradient, although the loss depends on them."
        advice = f"look for detach(), no_grad(), .data or an operation without gradient behind {cut}"
        yield Finding("no_gradient", "error", message, cut, value=len(missing), advice=advice)


def _next_to_the_cut(trial: Trial, missing: list[str]) -> str | None:
    called = trial.first_step.record.called
    position = {name: called[module] for module, name in trial.names.items() if module in called}
    owners: dict[str, list[nn.Parameter]] = {}
    for name in missing:
        owners.setdefault(module_of(name), []).append(trial.parameters[name])
    loss = perturbed_loss(trial, [])

    def matters(modules: list[str]) -> bool:
        changed = perturbed_loss(trial, [p for module in modules for p in owners[module]])
        return abs(changed - loss) > 1e-6 * max(abs(loss), 1e-6)

    order = sorted(owners, key=lambda module: position.get(module, -1))
    if not matters(order):
        return None
    for _ in range(_MOST_FORWARDS):  # halve the interval that contains the last module that matters
        if len(order) == 1:
            break
        late = order[len(order) // 2 :]
        order = late if matters(late) else order[: len(order) // 2]
    if not order:
        raise CannotJudgeError("the loss changes from pass to pass")
    return order[-1] or trial.names[trial.model]
