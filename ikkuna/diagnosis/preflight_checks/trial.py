"""The passes that the checks before the first step read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.diagnosis.preflight_checks.batch import Batch
from ikkuna.diagnosis.preflight_checks.classification import Classification, arranged_scores
from ikkuna.diagnosis.preflight_checks.first_step import (
    CannotJudgeError,
    FirstStep,
    Gradient,
    Stopped,
    inner_loss,
    labels_outside,
    last_operations,
    main_output,
    summarised,
)
from ikkuna.diagnosis.preflight_checks.forward_record import recorded
from ikkuna.diagnosis.preflight_checks.restored import restored
from ikkuna.diagnosis.preflight_checks.unobserved import unobserved
from ikkuna.modules import class_name, named_modules, named_parameters
from ikkuna.probe.isolation import isolated, without_replica_wrappers
from ikkuna.probe.loss import run_model
from ikkuna.torch_internals import BATCH_NORMS, pytree
from ikkuna.undisturbed import undisturbed

__all__ = ["Trial", "train_norms"]


class Trial:
    """A model with a batch, a loss and optimizers, and the passes that checks need, each run at most once.

    Each pass restores the model, the loss module and all random states, and starts with the random state of the user.

    Parameters
    ----------
    model : nn.Module
        The model.
    batch : Batch, optional
        The batch.
    loss : callable, optional
        Called with the output and the labels.
    optimizers : tuple of torch.optim.Optimizer
        The optimizers.
    causal : bool, optional
        Whether an output may depend only on earlier positions; ``None`` if the batch decides.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch | None = None,
        loss: Callable[..., Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer, ...] = (),
        causal: bool | None = None,
    ) -> None:
        self.model = without_replica_wrappers(model)
        self.loss = loss
        self.optimizers = optimizers
        self.causal = causal
        self.names = {module: name or class_name(module).lower() for name, module in named_modules(model)}
        self.parameters = dict(named_parameters(model))
        if isinstance(loss, nn.Module):
            known = set(map(id, self.parameters.values()))
            own = {f"{class_name(loss).lower()}.{name}": p for name, p in named_parameters(loss)}
            self.parameters |= {name: p for name, p in own.items() if id(p) not in known}
        self._batch = batch if batch is None or self._device is None else batch.copy(self._device)

    @property
    def _device(self) -> torch.device | None:
        """The device of the parameters, if they have one device."""
        devices = {parameter.device for parameter in self.model.parameters()}
        return devices.pop() if len(devices) == 1 and "meta" not in {device.type for device in devices} else None

    # -- what exists without a pass
    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def batch(self) -> Batch:
        """The batch, on the device of the model.

        Raises
        ------
        CannotJudgeError
            If there is none, or if it is empty.
        """
        if self._batch is None:
            raise CannotJudgeError("no batch was given")
        tensors = self._batch.tensors
        if not tensors:
            raise CannotJudgeError("the batch contains no tensor")
        if self._batch.size == 0 or not any(tensor.numel() for tensor in tensors):
            raise CannotJudgeError("the batch is empty")
        return self._batch

    def require_values(self) -> None:
        """Raise `CannotJudgeError` if the parameters have no values."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if any(is_lazy(tensor) for tensor in tensors):
            raise CannotJudgeError("the model has lazy parameters; call it once before")
        if any(tensor.is_meta for tensor in tensors):
            raise CannotJudgeError("the model is on the meta device, where tensors have no values")

    @property
    def _owners(self) -> list[nn.Module]:
        """The modules that passes run: the model, and the loss if it is a module."""
        return [self.model, *([self.loss] if isinstance(self.loss, nn.Module) else [])]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore attributes and values of the model and the loss after the body."""
        try:
            self.require_values()
        except CannotJudgeError:  # no pass will run
            yield
            return
        with restored(self._owners):
            yield

    # -- passes
    @contextmanager
    def running(self, *, as_training: bool = False, autograd: bool = False) -> Iterator[None]:
        """Restore everything after the body.

        Parameters
        ----------
        as_training : bool
            Use the modes in which the user left the modules, instead of evaluation mode.
        autograd : bool
            Record operations for a backward pass.
        """
        self.require_values()
        modes = [(module, module.training) for owner in self._owners for module in owner.modules()]
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(unobserved(self._owners))
            for owner in self._owners[1:]:
                stack.enter_context(undisturbed(owner, autograd=True))
            stack.enter_context(isolated(self.model))
            if as_training:
                for module, training in modes:
                    module.training = training
            stack.callback(_refresh_recurrent_weights, self.model)
            stack.enter_context(torch.set_grad_enabled(autograd))
            yield

    def evaluate(self, batch: Batch, *, batch_statistics: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return output and loss of the model in evaluation mode; the loss only if the model computes it.

        With ``batch_statistics=True`` batch norms stay in training mode: those of a new model do not normalise otherwise.

        Raises
        ------
        CannotJudgeError
            If the model raises, or if its output contains no tensor.
        """
        with self.running():
            if batch_statistics:
                train_norms(self.model)
            try:
                result = run_model(self.model, batch.copy().inputs)
            except Exception as error:
                raise CannotJudgeError(
                    f"in evaluation mode the model raises {Stopped('', None, error).text}"
                ) from error
            output = main_output(result, batch.loss_inside)
            loss = inner_loss(result) if batch.loss_inside else None
        return output, loss

    @cached_property
    def evaluated(self) -> Tensor:
        """The output for the batch in evaluation mode."""
        return self.evaluate(self.batch)[0]

    @cached_property
    def first_step(self) -> FirstStep:
        """Forward, loss and gradients in the modes in which the user left the modules."""
        step = FirstStep()
        batch = self.batch.copy()
        self._check_labels_inside(step)
        if step.stopped:
            return step
        with self.running(as_training=True, autograd=True):
            with recorded(self.model, self.names, batch.size) as step.record:
                try:
                    result = run_model(self.model, batch.inputs)
                except Exception as error:
                    running = step.record.running
                    step.stopped = Stopped("forward", running[-1] if running else None, error)
                    return step
            loss = self._first_loss(step, result, batch)
            if loss is not None:
                self._first_gradients(step, loss)
        return step

    def _check_labels_inside(self, step: FirstStep) -> None:
        """Compare labels with the output before the model computes a loss, which can end all use of a GPU."""
        labels = self.batch.labels
        if not self.batch.loss_inside or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        try:
            output, _ = self.evaluate(self.batch.unlabelled())
        except CannotJudgeError:
            return
        task = arranged_scores(output, labels, class_axis_last=True)
        if task and (error := labels_outside(task)):
            step.output, step.stopped = output, Stopped("labels", None, error)

    def _first_loss(self, step: FirstStep, result: Any, batch: Batch) -> Tensor | None:
        with suppress(CannotJudgeError):
            step.produced_by = last_operations(main_output(result, batch.loss_inside))
            step.result = pytree.tree_map_only(Tensor, Tensor.detach, result)
            step.output = main_output(step.result, batch.loss_inside)
        if batch.loss_inside:
            loss = inner_loss(result)
        elif self.loss is None:
            return None
        else:
            loss = self._outer_loss(step, result, batch.labels)
        step.loss = loss.detach() if loss is not None else None
        return loss

    def _outer_loss(self, step: FirstStep, result: Any, labels: Any) -> Tensor | None:
        task = None if step.output is None else arranged_scores(step.output, labels)
        ignored = getattr(self.loss, "ignore_index", -100)
        if task and (error := labels_outside(task, ignored)) and self._raises_on_host(result, labels):
            step.stopped = Stopped("labels", None, error)
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loss = self.call_loss(result, labels)
            except Exception as error:
                step.stopped = Stopped("loss", None, error)
                return None
        step.warnings = [str(warning.message) for warning in caught]
        return loss

    def _raises_on_host(self, result: Any, labels: Any) -> bool:
        """Return whether the loss refuses these labels; a loss may ignore some that are out of range."""

        def host(tensor: Tensor) -> Tensor:
            return tensor.detach().cpu()

        try:
            self.call_loss(*(pytree.tree_map_only(Tensor, host, value) for value in (result, labels)))
        except Exception:
            return True
        return False

    def call_loss(self, result: Any, labels: Any) -> Tensor:
        """Return what the loss function returns for an output and labels."""
        assert self.loss is not None
        if isinstance(self.loss, nn.Module) and type(self.loss).__module__.startswith("torch."):
            result = getattr(result, "logits", result)  # the models of transformers return several values
        loss: Tensor = self.loss(result) if labels is None else self.loss(result, labels)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss function returned a {type(loss).__name__} instead of a tensor")
        return loss

    def loss_of(self, output: Tensor, labels: Any) -> Tensor:
        """Return the loss that the first step would have with another main output."""
        step = self.first_step
        result = pytree.tree_map_only(Tensor, lambda leaf: output if leaf is step.output else leaf, step.result)
        return self.call_loss(result, labels)

    def _first_gradients(self, step: FirstStep, loss: Tensor) -> None:
        step.has_gradient = loss.requires_grad
        if loss.numel() != 1 or not loss.requires_grad:
            return
        names, parameters = list(self.trainable), list(self.trainable.values())
        try:
            gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
        except Exception as error:
            stage = "gradient" if "torch.utils.checkpoint" in str(error) else "backward"
            step.stopped = Stopped(stage, None, error)
            return
        step.gradients = {name: summarised(value) for name, value in zip(names, gradients, strict=True)}

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


def train_norms(model: nn.Module) -> None:
    """Put batch norms into training mode."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.training = True


def _refresh_recurrent_weights(model: nn.Module) -> None:
    """Let RNNs forget the weights that ``functional_call`` lent them."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._update_flat_weights()
