"""The passes that the checks before the first step read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ikkuna.diagnosis.history import History, Network
from ikkuna.diagnosis.preflight_checks.batch import Batch
from ikkuna.diagnosis.preflight_checks.contracts import LossCall
from ikkuna.diagnosis.preflight_checks.first_step import FirstStep, Gradient, run_first_step
from ikkuna.diagnosis.preflight_checks.outputs import (
    CannotJudgeError,
    Classification,
    arranged_scores,
    inner_loss,
    main_output,
)
from ikkuna.diagnosis.preflight_checks.training_setup import (
    Evaluation,
    ObjectiveModel,
    TrainingSetup,
    restored,
    train_norms,
)
from ikkuna.diagnosis.rule import Score, get_rules
from ikkuna.store.finding import Finding
from ikkuna.store.values import ModuleEntry
from ikkuna.support.failures import error_text
from ikkuna.support.modules import class_name
from ikkuna.support.torch_internals import pytree
from ikkuna.support.undisturbed import run_model


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

    @cached_property
    def of_model(self) -> Trial:
        """A trial of the model alone, with what an objective calls it with first; this trial without an objective.

        Raises
        ------
        CannotJudgeError
            If the objective does not call the model, or with positional and named arguments.
        """
        if not isinstance(self.model, ObjectiveModel):
            return self
        result = self.first_step.result or {}
        args, kwargs = result.get("args", ()), result.get("kwargs", {})
        if bool(args) == bool(kwargs):
            raise CannotJudgeError("the inputs with which the objective calls the model are not known")
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        return Trial(self.model.module, Batch(inputs), None, self.optimizers, self.causal)

    def loss_of(self, output: Tensor, labels: Any) -> Tensor:
        """Return the loss that the first step would have with another main output."""
        step = self.first_step
        result = pytree.tree_map_only(Tensor, lambda leaf: output if leaf is step.output else leaf, step.result)
        return self.call_loss(result, labels)

    @property
    def last_activation(self) -> str | None:
        """The name of the last module, if it is the activation that is the last operation of the output."""
        leaves = [(module, name) for module, name in self.names.items() if next(module.children(), None) is None]
        called = [(call.module, call.name) for call in self.first_step.record.calls]
        module, name = ([each for each in called if each in leaves] or leaves)[-1]
        last = self.first_step.produced_by[:1]
        return name if module is not self.model and last and class_name(module).lower() == last[0].lower() else None

    @cached_property
    def in_double_precision(self) -> Trial:
        """A trial of a copy of the model that computes in double precision.

        Raises
        ------
        CannotJudgeError
            If the model or the loss cannot be copied.
        """
        try:
            model, loss = copy.deepcopy(self.model).double(), self.loss
            loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
        except Exception as error:
            raise CannotJudgeError(f"the model cannot be copied: {type(error).__name__}") from error
        return Trial(model, self.batch.map(lambda t: t.double() if t.is_floating_point() else t), loss)

    def loss_of_result(self, result: Any) -> Tensor:
        """Return the loss of what the model returned for the batch."""
        if not self.batch.loss_inside:
            return self.call_loss(result, self.batch.copy().labels)
        loss = inner_loss(result)
        if loss is None:
            raise CannotJudgeError("the model returned no loss")
        return loss

    def gradient_of_output(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the main output, for another main output and other labels."""
        with self.running(as_training=True, autograd=True):
            source = output.detach().clone().requires_grad_()
            return torch.autograd.grad(self.loss_of(source, labels.clone()), source)[0]

    @cached_property
    def mixes_outputs(self) -> bool:
        """Whether the gradient of the loss for the first output depends on the others, as in a contrastive loss."""
        output = self.output
        others = torch.cat([output[:1], output[1:].flip(0) * 0.5 + 0.1])
        a, b = (self.gradient_of_output(value, self.batch.labels)[0] for value in (output, others))
        return not torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))

    def bad_scores(self, rule: str, values: Mapping[str, float]) -> list[Score]:
        """Return what a rule finds, by its own threshold, in values of the network at the first step."""
        modules = (each for each in self.names.items() if next(each[0].children(), None) is None)
        history = History(Network(ModuleEntry(name, class_name(module)) for module, name in modules))
        for kind, value in values.items():
            history.add(kind, None, 0, value)
        return [score for each in get_rules(rule) for score in each.scores(history) if score.value >= 1]

    # -- parts of the first step, for checks
    @property
    def loss_calls(self) -> list[LossCall]:
        """The calls of losses of torch in the first step."""
        return self.first_step.loss_calls

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


def perturbed_output(trial: Trial, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the output in evaluation mode, except batch norms, with noise on `parameters`; the model keeps its own.

    Raises
    ------
    CannotJudgeError
        If the model raises, or if its output contains no tensor.
    """
    with trial.running():
        train_norms(trial.model)
        return main_output(_run(trial, perturbed(trial, parameters)), trial.batch.loss_inside)


def loss_with(trial: Trial, changed: dict[str, Tensor]) -> float:
    """Return the loss of the first step with other values of some parameters, by name; the model keeps its own.

    Raises
    ------
    CannotJudgeError
        If the model or the loss raises, or if there is no loss.
    """
    with trial.running(as_training=True):
        result = _run(trial, changed)
        return float(_guarded(lambda: trial.loss_of_result(result)).sum())


def gradients_with(trial: Trial, changed: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the gradients of the first step with other values of some parameters, see :func:`loss_with`."""
    with trial.running(as_training=True, autograd=True):
        values = {name: changed.get(name, p).detach().requires_grad_() for name, p in trial.trainable.items()}
        result = _run(trial, values)
        loss = _guarded(lambda: trial.loss_of_result(result)).sum()
        found = torch.autograd.grad(loss, [*values.values()], allow_unused=True)
    return dict(zip(values, found, strict=True))


def perturbed_loss(trial: Trial, parameters: Iterable[nn.Parameter]) -> float:
    """Return the loss of the first step with noise on `parameters`, see :func:`loss_with`."""
    return loss_with(trial, perturbed(trial, parameters))


def perturbed(trial: Trial, parameters: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Return the values of `parameters` with noise, by name."""
    values = dict(trial.model.named_parameters())
    return {name: values[name].detach() + noise for name, noise in directions(trial, parameters).items()}


def _run(trial: Trial, changed: dict[str, Tensor]) -> Any:
    caller = _Caller(trial.model, changed)
    with restored([trial.model], values=False):  # `functional_call` separates tied parameters of some models
        return _guarded(lambda: run_model(caller, trial.batch.copy().inputs))  # type: ignore[arg-type]


def directions(trial: Trial, parameters: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """Return noise by name of the parameter, with its root mean square and at least 0.1; the same in each call."""
    chosen = set(map(id, parameters))
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in trial.model.named_parameters():
        value = parameter.detach()
        if id(parameter) in chosen and value.is_floating_point() and value.numel():
            noise = torch.randn(value.shape, generator=generator, device="cpu").to(value)
            found[name] = noise * value.square().mean().sqrt().clamp(min=0.1)
    return found


def _guarded(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise CannotJudgeError(f"with changed parameters the model raises {error_text(error)}"[:200]) from error


class _Caller:
    """A model with other parameters."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        self.model, self.changed = model, parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.model, self.changed, args, kwargs)


Check = Callable[[Trial], Iterable[Finding]]
