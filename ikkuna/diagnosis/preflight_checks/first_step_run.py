"""Runs the first step of a training setup: forward, loss and gradients."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ikkuna.diagnosis.preflight_checks.training_setup import (
    Batch,
    CannotJudgeError,
    FirstStep,
    Stopped,
    TrainingSetup,
    arranged_scores,
    inner_loss,
    labels_outside,
    last_operations,
    main_output,
    recorded,
    summarised,
)
from ikkuna.support.torch_internals import pytree
from ikkuna.support.undisturbed import run_model

__all__ = ["run_first_step"]


def run_first_step(setup: TrainingSetup) -> FirstStep:
    """Return forward, loss and gradients in the modes in which the user left the modules; the optimizers make no step."""
    step = FirstStep()
    batch = setup.batch.copy()
    _check_labels_inside(setup, step)
    if step.stopped:
        return step
    with setup.running(as_training=True, autograd=True):
        with recorded(setup.model, setup.names, batch.size) as step.record:
            try:
                result = run_model(setup.model, batch.inputs)
            except Exception as error:
                running = step.record.running
                step.stopped = Stopped("forward", running[-1] if running else None, error)
                return step
        loss = _loss(setup, step, result, batch)
        if loss is not None:
            _add_gradients(setup, step, loss)
    return step


def _check_labels_inside(setup: TrainingSetup, step: FirstStep) -> None:
    """Compare labels with the output before the model computes a loss, which can end all use of a GPU."""
    labels = setup.batch.labels
    if not setup.batch.loss_inside or not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    try:
        output = setup.evaluate(setup.batch.unlabelled()).output
    except CannotJudgeError:
        return
    task = arranged_scores(output, labels, class_axis_last=True)
    if task and (error := labels_outside(task)):
        step.output, step.stopped = output, Stopped("labels", None, error)


def _loss(setup: TrainingSetup, step: FirstStep, result: Any, batch: Batch) -> Tensor | None:
    with suppress(CannotJudgeError):
        step.produced_by = last_operations(main_output(result, batch.loss_inside))
        step.result = pytree.tree_map_only(Tensor, Tensor.detach, result)
        step.output = main_output(step.result, batch.loss_inside)
    if batch.loss_inside:
        loss = inner_loss(result)
    elif setup.loss is None:
        return None
    else:
        loss = _outer_loss(setup, step, result, batch.labels)
    step.loss = loss.detach() if loss is not None else None
    return loss


def _outer_loss(setup: TrainingSetup, step: FirstStep, result: Any, labels: Any) -> Tensor | None:
    task = None if step.output is None else arranged_scores(step.output, labels)
    ignored = getattr(setup.loss, "ignore_index", -100)
    if task and (error := labels_outside(task, ignored)) and _raises_on_host(setup, result, labels):
        step.stopped = Stopped("labels", None, error)
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = setup.call_loss(result, labels)
        except Exception as error:
            step.stopped = Stopped("loss", None, error)
            return None
    step.warnings = [str(warning.message) for warning in caught]
    return loss


def _raises_on_host(setup: TrainingSetup, result: Any, labels: Any) -> bool:
    """Return whether the loss refuses these labels; a loss may ignore some that are out of range."""

    def host(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu()

    try:
        setup.call_loss(*(pytree.tree_map_only(Tensor, host, value) for value in (result, labels)))
    except Exception:
        return True
    return False


def _add_gradients(setup: TrainingSetup, step: FirstStep, loss: Tensor) -> None:
    step.has_gradient = loss.requires_grad
    if loss.numel() != 1 or not loss.requires_grad:
        return
    names, parameters = list(setup.trainable), list(setup.trainable.values())
    try:
        gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
    except Exception as error:
        stage = "gradient" if "torch.utils.checkpoint" in str(error) else "backward"
        step.stopped = Stopped(stage, None, error)
        return
    step.gradients = {name: summarised(value) for name, value in zip(names, gradients, strict=True)}
