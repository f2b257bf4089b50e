"""Checks that forward, loss and backward run and reach every parameter, and of what their graph shows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.mistakes import FIRST_STEP_RUNS, LABEL_DTYPE, LABEL_RANGE, LABEL_SHAPE, NO_GRADIENT
from ikkuna.diagnosis.objective.graph import ObjectiveGraph
from ikkuna.diagnosis.objective.recorded import RecordedObjective
from ikkuna.diagnosis.preflight_checks.batch import tensors_of
from ikkuna.diagnosis.preflight_checks.first_step import Stopped
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, IndexOutsideError, arranged_scores, main_output
from ikkuna.diagnosis.preflight_checks.training_setup import ObjectiveModel
from ikkuna.diagnosis.preflight_checks.trial import Trial, perturbed_loss
from ikkuna.printable import counted, listed
from ikkuna.store.finding import Finding
from ikkuna.support.modules import common_module, module_of
from ikkuna.support.undisturbed import run_model

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
        elif stopped.stage == "forward" and _runs_with_the_compiler(trial):
            raise CannotJudgeError("the model runs, but not while these checks observe it, as with torch.cond")
        elif not any(_finds(check, trial) for check in (label_range, label_dtype, label_shape)):
            name = {"forward": "The forward pass", "loss": "The loss", "backward": "The backward pass"}[stopped.stage]
            detail = f"{name} raises {stopped.text}"
            yield FIRST_STEP_RUNS.found(module=stopped.module, detail=detail, advice=_advice(trial, stopped))
    elif not trial.batch.loss_inside and trial.loss is None:
        return
    elif (loss := trial.first_step.loss) is not None and loss.numel() != 1:
        detail = f"The loss has the shape {tuple(loss.shape)}, but backward() needs one number."
        advice = 'use reduction="mean", or call loss.mean().backward()'
        yield FIRST_STEP_RUNS.found(loss.numel(), detail=detail, advice=advice)


def _runs_with_the_compiler(trial: Trial) -> bool:
    """Return whether the forward raises only because checks run without the compiler, which ``torch.cond`` needs."""
    try:
        with trial.running(as_training=True, autograd=True), torch.compiler.set_stance("default"):
            run_model(trial.model, trial.batch.copy().inputs)
    except Exception:
        return False
    return True


def _finds(check: Callable[[Trial], Iterator[Finding]], trial: Trial) -> bool:
    try:
        return any(True for _ in check(trial))
    except CannotJudgeError:
        return False


def _index_outside(error: IndexOutsideError) -> Finding:
    detail = f"The indices go from {error.low} to {error.high}, but the embedding has {error.size} rows."
    advice = "make the embedding larger, or check the tokenizer, padding and the length of sequences"
    return FIRST_STEP_RUNS.found(error.high, error.module, detail=detail, advice=advice)


def _advice(trial: Trial, stopped: Stopped) -> str:
    wanted = next((p.dtype for p in trial.model.parameters() if p.is_floating_point()), None)
    given = {tensor.dtype for tensor in trial.batch.tensors if tensor.is_floating_point()}
    if stopped.stage == "forward" and wanted is not None and given and wanted not in given:
        return f"convert the inputs to {wanted}"
    return ""


def label_range(trial: Trial) -> Iterator[Finding]:
    """Find labels that are no index of a class; on a GPU they end the process with a device-side assertion."""
    stopped = trial.first_step.stopped
    if stopped is None:
        _ = trial.classification
    elif stopped.stage == "labels" and isinstance(error := stopped.error, IndexOutsideError):
        detail = f"The labels go from {error.low} to {error.high}, but the model has outputs for {error.size} classes."
        is_shifted = error.low == 1 and error.high == error.size
        yield LABEL_RANGE.found(error.high, detail=detail, advice="subtract 1 from the labels" if is_shifted else "")


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
            detail = f"They have the dtype {labels.dtype}, but {wants}."
            yield LABEL_DTYPE.found(detail=detail, advice=f"convert the labels with .to({change})")
            return


def label_shape(trial: Trial) -> Iterator[Finding]:
    """Find labels with a shape that the loss refuses or broadcasts.

    A label that changes the gradient for other samples by a common factor alone, that of a normaliser, is not broadcast.
    """
    labels = _refused(trial)
    if labels is not None:
        if labels.ndim > 1 and labels.shape[-1] == 1 and _accepts(trial, lambda y: y.squeeze(-1).long()):
            detail = (
                f"The labels have the shape {tuple(labels.shape)}, but the loss wants one index for each prediction."
            )
            yield LABEL_SHAPE.found(detail=detail, advice="remove the last axis with labels.squeeze(-1)")
        return
    if trial.loss is None or not isinstance(labels := trial.batch.labels, Tensor):
        raise CannotJudgeError("there is no loss of output and labels")
    output = trial.output
    warned = any("target size" in text and "different" in text for text in trial.first_step.warnings)
    column = output.numel() == labels.numel() > 1 and output.shape != labels.shape and labels.is_floating_point()
    if warned or (column and _mixes_samples(trial)):
        shapes = f"The output has the shape {tuple(output.shape)} and the labels {tuple(labels.shape)}"
        yield LABEL_SHAPE.found(detail=f"{shapes}: the loss compares each output with each label.")


def _refused(trial: Trial) -> Tensor | None:
    """Return the labels if the loss, or its backward pass, has raised because of them."""
    stopped, labels = trial.first_step.stopped, trial.batch.labels
    if stopped is None or stopped.stage not in ("loss", "backward") or not isinstance(labels, Tensor):
        return None
    return labels if trial.loss is not None and trial.first_step.output is not None else None


def _accepts(trial: Trial, change: Callable[[Tensor], Tensor]) -> bool:
    """Return whether loss and backward accept changed labels; on the host, where wrong indices raise."""
    try:
        trial.gradient_of_output(trial.output.cpu(), change(trial.batch.labels.cpu()))
    except Exception:
        return False
    return True


def _mixes_samples(trial: Trial) -> bool:
    """Return whether the label of one sample changes the gradient for others by more than a common factor.

    A common factor is that of a normaliser of the loss, such as the number of objects among the labels.
    """
    labels = trial.batch.labels.detach()
    changed = labels.clone()
    changed.flatten()[0] += 1
    try:
        first, second = (trial.gradient_of_output(trial.output, y).flatten()[1:].float() for y in (labels, changed))
    except Exception:
        return False
    if first.std(correction=0) > 1e-4 * first.abs().max():  # of equal numbers every other ones would be a multiple
        first = first * (first @ second) / first.square().sum()
    return not torch.allclose(first, second, rtol=1e-4, atol=1e-4 * float(second.abs().max()))


_MOST_FORWARDS = 12


def no_gradient(trial: Trial) -> Iterator[Finding]:
    """Find trainable parameters without a gradient on which the loss depends, and those on which it does not.

    Noise on the parameters of one module at a time, from the last module to the first one, shows which is next to the
    cut.  These passes run only if there are parameters without a gradient.
    """
    if trial.parameters and not trial.trainable:
        advice = "call requires_grad_(True) on the parameters that should train"
        last = _last_with_parameters(trial)
        detail = (
            f"No parameter is trainable, not even those of the last layer, {last}."
            if last
            else "No parameter is trainable."
        )
        yield NO_GRADIENT.found(module=last, detail=detail, advice=advice)
        return
    if trial.first_step.loss is not None and not trial.first_step.has_gradient:
        yield NO_GRADIENT.found(
            detail="The loss has no gradient: something between the model and the loss detaches it."
        )
        return
    missing = [name for name, gradient in trial.gradients.items() if gradient is None]
    if not missing:
        return
    cut = _next_to_the_cut(trial, missing)
    if cut is None:
        detail = f"The loss does not depend on {counted(len(missing), 'parameter')}: {listed(missing)}."
        advice = "freeze or remove them; DistributedDataParallel needs find_unused_parameters=True"
        module = common_module(missing)
        yield NO_GRADIENT.found(len(missing), module, detail=detail, advice=advice, at_most="info")
    else:
        detail = f"The loss depends on {counted(len(missing), 'parameter')} without a gradient, the last one in {cut}."
        end, advice = _end_of_gradient(trial), ""
        if end not in (None, cut):
            detail += f" The gradient ends in {end}: its inputs need one and get none."
            advice = "search in this module for detach(), .data, torch.no_grad(), an argmax, or a backward that returns no gradient"
        yield NO_GRADIENT.found(len(missing), end or cut, detail=detail, advice=advice)


def _last_with_parameters(trial: Trial) -> str | None:
    """Return the name of the last module called that has parameters of its own."""
    calls = trial.first_step.record.calls
    owners = (call.name for call in reversed(calls) if next(call.module.parameters(recurse=False), None) is not None)
    return next(owners, None)


def _end_of_gradient(trial: Trial) -> str | None:
    """Return the first module with inputs that need a gradient and get none, although the loss depends on its output.

    Its output has a gradient, as that of a function whose backward returns nothing, or is detached.  ``None`` if there is no such module.
    """
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    with trial.running(as_training=True, autograd=True), ExitStack() as stack:
        for module, name in trial.names.items():

            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                floating = [t for t in tensors_of(output) if t.is_floating_point()]
                calls.append((name, [t for t in tensors_of((args, kwargs)) if t.requires_grad], floating))

            stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        loss = trial.loss_of_result(run_model(trial.model, trial.batch.copy().inputs)).sum()
        known = {id(t): t for _, given, made in calls for t in (*given, *made) if t.requires_grad}
        gradients = torch.autograd.grad(loss, [*known.values()], allow_unused=True)
    reached = {key for key, gradient in zip(known, gradients, strict=True) if gradient is not None}
    for name, given, made in calls:
        passes = any(id(t) in reached or not t.requires_grad for t in made)
        if given and passes and not any(id(t) in reached for t in given):
            return name
    return None


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
    return order[-1] or trial.root


def first_objective(trial: Trial) -> Iterator[Finding]:
    """Find what `watch` finds in the graphs of the first backward passes, see `RecordedObjective`, in that of one pass."""
    if trial.loss_value.numel() != 1 or not trial.first_step.has_gradient:
        raise CannotJudgeError("the loss has no gradient")
    model = trial.model.module if isinstance(trial.model, ObjectiveModel) else trial.model
    read, outputs = RecordedObjective(model), list[Tensor]()

    def called(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        read.model_called(args, kwargs)
        outputs.extend(tensors_of(output))

    with trial.running(as_training=True, autograd=True):
        hook = model.register_forward_hook(called, with_kwargs=True)
        batch = trial.batch.copy()
        try:
            result = run_model(trial.model, batch.inputs)
        finally:
            hook.remove()
        loss = trial.loss_of_result(result).reshape(())
        read.backward_starts(ObjectiveGraph([loss]), outputs, is_known=not batch.loss_inside)
        with suppress(CannotJudgeError):  # without an output the graph is read all the same
            output = main_output(result, batch.loss_inside)
            (grad,) = torch.autograd.grad(loss, output, allow_unused=True) if output.requires_grad else (None,)
            if grad is not None:
                read.output_gradient(grad)
    yield from read.findings()
