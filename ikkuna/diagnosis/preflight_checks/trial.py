"""The passes that the checks before the first step read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from ikkuna.diagnosis.preflight_checks.classification import Classification, arranged_scores
from ikkuna.diagnosis.preflight_checks.first_step import CannotJudgeError, FirstStep, Gradient
from ikkuna.diagnosis.preflight_checks.first_step_run import run_first_step
from ikkuna.diagnosis.preflight_checks.training_setup import Evaluation, TrainingSetup
from ikkuna.torch_internals import pytree

__all__ = ["Trial"]


class Trial(TrainingSetup):
    """A training setup with the passes that several checks need, each run at most once.

    The parameters are those of `TrainingSetup`.
    """

    @cached_property
    def evaluation(self) -> Evaluation:
        """The results for the batch in evaluation mode."""
        return self.evaluate(self.batch)

    @property
    def evaluated(self) -> Tensor:
        """The output for the batch in evaluation mode."""
        return self.evaluation.output

    @cached_property
    def first_step(self) -> FirstStep:
        """Forward, loss and gradients in the modes in which the user left the modules."""
        return run_first_step(self)

    def loss_of(self, output: Tensor, labels: Any) -> Tensor:
        """Return the loss that the first step would have with another main output."""
        step = self.first_step
        result = pytree.tree_map_only(Tensor, lambda leaf: output if leaf is step.output else leaf, step.result)
        return self.call_loss(result, labels)

    # -- parts of the first step, for checks
    @property
    def output(self) -> Tensor:
        """The output of the first step.

        Raises
        ------
        CannotJudgeError
            If there is none.
        """
        if self.first_step.output is None:
            raise CannotJudgeError(self._reason("forward") or "the output of the model contains no tensor")
        return self.first_step.output

    @property
    def loss_value(self) -> Tensor:
        """The loss of the first step, before a check of its shape.

        Raises
        ------
        CannotJudgeError
            If there is none.
        """
        if self.first_step.loss is None:
            no_loss = "the model returned no loss" if self.batch.loss_inside else "no loss was given"
            raise CannotJudgeError(self._reason("loss") or no_loss)
        return self.first_step.loss

    @property
    def gradients(self) -> dict[str, Gradient | None]:
        """The gradients of the first step.

        Raises
        ------
        CannotJudgeError
            If there are none.
        """
        if not self.first_step.gradients:
            _ = self.loss_value
            raise CannotJudgeError(self._reason("gradients") or "the loss has no gradient")
        return self.first_step.gradients

    def _reason(self, what: str) -> str:
        stopped = self.first_step.stopped
        return f"the first step has no {what}: {stopped.text}" if stopped else ""

    @property
    def classification(self) -> Classification:
        """Scores and labels of the first step.

        Raises
        ------
        CannotJudgeError
            If output and labels are no classification.
        """
        task = arranged_scores(self.output, self.batch.labels, self.batch.loss_inside)
        if task is None:
            raise CannotJudgeError("output and labels are not those of a classification")
        return task
