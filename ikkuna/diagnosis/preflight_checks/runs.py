"""Check that forward, loss and backward run, with the cause where it is a usual one."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.preflight_checks.classification import arranged_scores
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError, Stopped
from ikkuna.diagnosis.preflight_checks.forward_record import IndexOutsideError
from ikkuna.diagnosis.preflight_checks.trial import Trial

__all__ = ["first_step_runs", "label_dtype", "label_range", "label_shape"]

_FLOAT = "the loss wants floating-point labels"
_INTEGER = "the loss wants indices of classes"


def first_step_runs(trial: Trial) -> Iterator[Finding]:
    """Find an exception in forward, loss or backward that no other check explains."""
    stopped = trial.first_step.stopped
    if stopped is not None and stopped.stage == "gradient":
        raise CannotJudgeError(stopped.text)
    if stopped is not None:
        if isinstance(stopped.error, IndexOutsideError) and stopped.stage == "forward":
            yield _index_outside(stopped.error)
        elif not any(_finds(check, trial) for check in (label_range, label_dtype, label_shape)):
            name = {"forward": "The forward pass", "loss": "The loss", "backward": "The backward pass"}[stopped.stage]
            message = f"{name} raises {stopped.text}"
            yield Finding("first_step_runs", "error", message, stopped.module, advice=_advice(trial, stopped))
    elif not trial.batch.loss_inside and trial.loss is None:
        return
    elif (loss := trial.first_step.loss) is not None and loss.numel() != 1:
        message = f"The loss has the shape {tuple(loss.shape)}, but backward() needs one number."
        advice = 'use reduction="mean", or call loss.mean().backward()'
        yield Finding("first_step_runs", "error", message, value=loss.numel(), advice=advice)


def _finds(check: Callable[[Trial], Iterator[Finding]], trial: Trial) -> bool:
    try:
        return any(True for _ in check(trial))
    except CannotJudgeError:
        return False


def _index_outside(error: IndexOutsideError) -> Finding:
    message = f"The indices go from {error.low} to {error.high}, but the embedding has {error.size} rows."
    advice = "make the embedding larger, or check the tokenizer, padding and the length of sequences"
    return Finding("first_step_runs", "error", message, error.module, value=error.high, advice=advice)


def _advice(trial: Trial, stopped: Stopped) -> str:
    wanted = next((p.dtype for p in trial.model.parameters() if p.is_floating_point()), None)
    given = {tensor.dtype for tensor in trial.batch.tensors if tensor.is_floating_point()}
    if stopped.stage == "forward" and wanted is not None and given and wanted not in given:
        return f"convert the inputs to {wanted}"
    return "run the model on this batch by hand"


def label_range(trial: Trial) -> Iterator[Finding]:
    """Find labels that are no index of a class; on a GPU they end the process with a device-side assertion."""
    stopped = trial.first_step.stopped
    if stopped is None:
        _ = trial.classification
    elif stopped.stage == "labels" and isinstance(error := stopped.error, IndexOutsideError):
        message = f"The labels go from {error.low} to {error.high}, but the model has outputs for {error.size} classes."
        shifted = error.low == 1 and error.high == error.size
        advice = "subtract 1 from the labels" if shifted else "change the number of outputs, or the labels"
        yield Finding("label_range", "error", message, value=error.high, advice=advice)


def label_dtype(trial: Trial) -> Iterator[Finding]:
    """Find labels with a dtype that the loss refuses, although it accepts their values."""
    labels = _refused(trial)
    if labels is None:
        return
    changes = [(trial.output.dtype, _FLOAT)] if labels.dtype != trial.output.dtype else []
    if (
        labels.dtype != torch.long
        and arranged_scores(trial.output, labels.long())
        and bool((labels == labels.long()).all())
    ):
        changes.append((torch.long, _INTEGER))
    for change, wants in changes:
        if _accepts(trial, lambda y, change=change: y.to(change)):  # type: ignore[misc]
            message = f"The labels have the dtype {labels.dtype}, but {wants}."
            yield Finding("label_dtype", "error", message, advice=f"convert the labels with .to({change})")
            return


def label_shape(trial: Trial) -> Iterator[Finding]:
    """Find labels with a shape that the loss refuses or broadcasts."""
    labels = _refused(trial)
    if labels is not None:
        if labels.ndim > 1 and labels.shape[-1] == 1 and _accepts(trial, lambda y: y.squeeze(-1).long()):
            message = (
                f"The labels have the shape {tuple(labels.shape)}, but the loss wants one index for each prediction."
            )
            yield Finding("label_shape", "error", message, advice="remove the last axis with labels.squeeze(-1)")
        return
    if trial.loss is None or not isinstance(labels := trial.batch.labels, Tensor):
        raise CannotJudgeError("there is no loss of output and labels")
    output = trial.output
    warned = any("target size" in text and "different" in text for text in trial.first_step.warnings)
    column = output.numel() == labels.numel() > 1 and output.shape != labels.shape and labels.is_floating_point()
    if warned or (column and _mixes_samples(trial)):
        message = (
            f"The output has the shape {tuple(output.shape)} and the labels {tuple(labels.shape)}: "
            "the loss compares each output with each label."
        )
        advice = "give both the same shape, for example with output.squeeze(-1)"
        yield Finding("label_shape", "error", message, advice=advice)


def _refused(trial: Trial) -> Tensor | None:
    """Return the labels if the loss, or its backward pass, has raised because of them."""
    stopped, labels = trial.first_step.stopped, trial.batch.labels
    if stopped is None or stopped.stage not in ("loss", "backward") or not isinstance(labels, Tensor):
        return None
    return labels if trial.loss is not None and trial.first_step.output is not None else None


def _accepts(trial: Trial, change: Callable[[Tensor], Tensor]) -> bool:
    """Return whether loss and backward accept changed labels; on the host, where wrong indices raise."""
    try:
        _gradient_of_output(trial, trial.output.cpu(), change(trial.batch.labels.cpu()))
    except Exception:
        return False
    return True


def _mixes_samples(trial: Trial) -> bool:
    """Return whether the label of one sample changes the gradient for another."""
    labels = trial.batch.labels.detach()
    changed = labels.clone()
    changed.flatten()[0] += 1
    try:
        first, second = (_gradient_of_output(trial, trial.output, y).flatten()[1:] for y in (labels, changed))
    except Exception:
        return False
    return not torch.allclose(first, second, rtol=1e-4, atol=1e-4 * float(first.abs().max()))


def _gradient_of_output(trial: Trial, output: Tensor, labels: Tensor) -> Tensor:
    with trial.running(as_training=True, autograd=True):
        source = output.detach().clone().requires_grad_()
        return torch.autograd.grad(trial.loss_of(source, labels.clone()), source)[0]
