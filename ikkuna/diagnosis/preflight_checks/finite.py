"""Check of NaN and infinite elements."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError
from ikkuna.diagnosis.preflight_checks.names import counted, listed, module_of
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.modules import named_modules

__all__ = ["nonfinite"]


def nonfinite(trial: Trial) -> Iterator[Finding]:
    """Find NaN and infinite elements in the earliest place: parameters, buffers, inputs, outputs, loss, gradients."""
    trial.require_values()
    found = _of_parameters(trial) or _of_batch(trial) or _of_first_step(trial)
    if found is not None:
        yield found


def _of_parameters(trial: Trial) -> Finding | None:
    bad = [name for name, parameter in trial.parameters.items() if not _finite(parameter)]
    for prefix, module in named_modules(trial.model):
        for name, buffer in module._buffers.items():
            if buffer is not None and _bad_buffer(name, buffer):
                bad.append(f"{prefix}.{name}" if prefix else name)
    if not bad:
        return None
    message = f"NaN or infinite elements in {counted(len(bad), 'tensor')} of the model: {listed(bad)}."
    advice = "initialise the model again, or load another checkpoint"
    return Finding("nonfinite", "error", message, module_of(bad[0]) or None, value=len(bad), advice=advice)


def _of_batch(trial: Trial) -> Finding | None:
    for what, tensors in (("inputs", trial.batch.tensors), ("labels", [trial.batch.labels])):
        for number, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            masked = number > 0 and tensor.is_floating_point()  # additive masks contain -inf
            known = tensor.masked_fill(tensor == -math.inf, 0.0) if masked else tensor
            if not _finite(known):
                count = int((~known.isfinite()).sum())
                message = f"The {what} contain {counted(count, 'NaN or infinite element')}."
                return Finding("nonfinite", "error", message, value=count, advice="clean the data set")
    return None


def _of_first_step(trial: Trial) -> Finding | None:
    step = trial.first_step
    loss_finite = step.loss is None or _finite(step.loss)
    if (step.output is not None and not _finite(step.output)) or not loss_finite:
        source = next((call.name for call in step.record.calls if not call.finite), None)
        if source is None:
            all_ignored = _all_ignored(trial)
            message = "The loss is NaN or infinite although the output of the model is finite."
            advice = (
                "give labels that are not ignored" if all_ignored else "look for log(0), 0/0 or overflow in the loss"
            )
        else:
            message, advice = (
                f"{source} is the first module with NaN or infinite outputs.",
                "look at its inputs and operations",
            )
        return Finding("nonfinite", "error", message, source, advice=advice)
    bad = [name for name, gradient in step.gradients.items() if gradient is not None and not gradient.finite]
    if bad:
        message = (
            f"The gradients of {counted(len(bad), 'parameter')} are NaN or infinite, the loss is not: {listed(bad)}."
        )
        advice = "look for sqrt(0), norm(0) or a division by 0 behind the last of these modules"
        return Finding("nonfinite", "error", message, module_of(bad[-1]) or None, value=len(bad), advice=advice)
    return None


def _all_ignored(trial: Trial) -> bool:
    try:
        return not len(trial.classification.counted.labels)
    except CannotJudgeError:
        return False


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _bad_buffer(name: str, buffer: Tensor) -> bool:
    if not buffer.is_floating_point():
        return False
    infinite = name.startswith("running_") and bool(buffer.isinf().any())  # masks in buffers contain -inf
    return infinite or bool(buffer.isnan().any())
