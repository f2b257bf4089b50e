"""Results of the first step, and the exception that ended it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ikkuna.diagnosis.preflight_checks.batch import tensors_of
from ikkuna.diagnosis.preflight_checks.classification import Classification
from ikkuna.diagnosis.preflight_checks.forward_record import ForwardRecord, IndexOutsideError, widened

__all__ = [
    *("CannotJudgeError", "FirstStep", "Gradient", "Stopped"),
    *("inner_loss", "labels_outside", "last_operations", "main_output", "summarised"),
]


class CannotJudgeError(Exception):
    """A check cannot judge; the text says why."""


@dataclass(frozen=True)
class Stopped:
    """The exception that ended the first step.

    Parameters
    ----------
    stage : {'forward', 'labels', 'loss', 'backward', 'gradient'}
        What ran; ``'gradient'`` if only these checks cannot compute it, as with reentrant checkpoints.
    module : str, optional
        The innermost module that ran.
    error : Exception
        The exception.
    """

    stage: str
    module: str | None
    error: Exception

    @property
    def text(self) -> str:
        """The class and the first line of the exception."""
        lines = str(self.error).strip().splitlines() or [""]
        return f"{type(self.error).__name__}: {lines[0]}"[:300]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter: its root mean square, and whether all elements are finite."""

    rms: float
    finite: bool


@dataclass
class FirstStep:
    """Forward, loss and gradients of the first step, as training would compute them.

    Parameters
    ----------
    record : ForwardRecord
        The calls of modules.
    output : Tensor, optional
        The scores or predictions: the first floating-point tensor of the model's output that is not the loss.
    result : object
        Everything that the model returned, detached.
    produced_by : tuple of str
        Names of the last operations of the output, from the last one, without changes of shape.
    loss : Tensor, optional
        The loss, detached.
    has_gradient : bool
        Whether autograd can differentiate the loss.
    gradients : dict of str to Gradient
        By name of the parameter; ``None`` for parameters that the loss does not reach.
    warnings : list of str
        Warnings of the loss.
    stopped : Stopped, optional
        Why later parts are missing.
    """

    record: ForwardRecord = field(default_factory=ForwardRecord)
    output: Tensor | None = None
    result: Any = None
    produced_by: tuple[str, ...] = ()
    loss: Tensor | None = None
    has_gradient: bool = False
    gradients: dict[str, Gradient | None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stopped: Stopped | None = None


def main_output(result: Any, loss_inside: bool) -> Tensor:
    """Return the scores or predictions in the output of a model.

    Raises
    ------
    CannotJudgeError
        If there is no floating-point tensor.
    """
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    loss = inner_loss(result) if loss_inside else None
    candidates = [tensor for tensor in tensors_of(result) if tensor.is_floating_point() and tensor is not loss]
    if not candidates:
        raise CannotJudgeError("the output of the model contains no floating-point tensor")
    return candidates[0]


def inner_loss(result: Any) -> Tensor | None:
    """Return the loss in the output of a model that computes it."""
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(named, Tensor):
        return named
    first = result[0] if isinstance(result, tuple) and result else result
    return first if isinstance(first, Tensor) and first.numel() == 1 else None


def labels_outside(task: Classification, ignored: int = -100) -> IndexOutsideError | None:
    """Return an error if a label is neither a class nor ignored."""
    labels = task.labels[task.labels != ignored]
    if not labels.numel():
        return None
    low, high = int(labels.min()), int(labels.max())
    return IndexOutsideError("labels", low, high, task.classes) if low < 0 or high >= task.classes else None


def summarised(value: Tensor | None) -> Gradient | None:
    """Return the summary of a gradient; ``None`` if there is none."""
    if value is None:
        return None
    dense = value.to_dense() if value.layout is not torch.strided else value
    rms = float(widened(dense.abs()).square().mean().sqrt()) if dense.numel() else math.nan
    return Gradient(rms, bool(dense.isfinite().all()))


_SHAPES = ("View", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Alias", "Clone", "T", "Select", "ToCopy")


def last_operations(output: Tensor) -> tuple[str, ...]:
    """Return the names of the last operations, without those that change only the shape."""
    names: list[str] = []
    node = output.grad_fn
    while node is not None and len(names) < 2:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name.removeprefix("Unsafe").removeprefix("_") not in _SHAPES:
            names.append(name)
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)
