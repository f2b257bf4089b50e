"""The check that reads the graph of autograd of the first loss."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ikkuna.diagnosis.objective.graph import ObjectiveGraph
from ikkuna.diagnosis.objective.recorded import RecordedObjective
from ikkuna.diagnosis.preflight_checks.batch import tensors_of
from ikkuna.diagnosis.preflight_checks.outputs import CannotJudgeError, main_output
from ikkuna.diagnosis.preflight_checks.training_setup import ObjectiveModel
from ikkuna.diagnosis.preflight_checks.trial import Trial
from ikkuna.store.finding import Finding
from ikkuna.support.undisturbed import run_model


def first_objective(trial: Trial) -> Iterator[Finding]:
    """Find what `watch` finds in the graphs of the first backward passes, see `RecordedObjective`, in that of one pass."""
    if trial.loss_value.numel() != 1 or not trial.first_step.has_gradient:
        raise CannotJudgeError("the loss has no gradient")
    model = trial.model.module if isinstance(trial.model, ObjectiveModel) else trial.model
    read, outputs = RecordedObjective(model), list[torch.Tensor]()

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
