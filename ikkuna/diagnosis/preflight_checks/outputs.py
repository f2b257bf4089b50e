"""The output of a model: scores, loss, and how labels belong to scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from ikkuna.diagnosis.preflight_checks.batch import tensors_of


class CannotJudgeError(Exception):
    """A check cannot judge; the text says why."""


class IndexOutsideError(Exception):
    """An embedding got an index that it does not have."""

    def __init__(self, module: str, low: int, high: int, size: int) -> None:
        super().__init__(f"indices from {low} to {high} for an embedding of {size} rows")
        self.module, self.low, self.high, self.size = module, low, high, size


@dataclass(frozen=True)
class Classification:
    """Scores and labels of each prediction.

    Parameters
    ----------
    scores : Tensor of shape (prediction, class)
        Outputs of the model.
    labels : Tensor of shape (prediction,)
        Indices of classes.
    """

    scores: Tensor
    labels: Tensor

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.scores.shape[1]

    @property
    def counted(self) -> Classification:
        """The predictions whose label is the index of a class."""
        known = (self.labels >= 0) & (self.labels < self.classes)
        return Classification(self.scores[known], self.labels[known])

    @property
    def cross_entropies(self) -> Tensor:
        """The cross-entropy of each prediction, of shape (prediction,)."""
        return functional.cross_entropy(self.scores.float(), self.labels.long(), reduction="none")

    @property
    def cross_entropy(self) -> float:
        """Mean cross-entropy; NaN without predictions."""
        return float(self.cross_entropies.mean()) if len(self.labels) else math.nan

    @property
    def negative_score(self) -> float:
        """Mean of the negative score of the label, as ``nll_loss`` computes it; NaN without predictions."""
        if not len(self.labels):
            return math.nan
        return float(functional.nll_loss(self.scores.float(), self.labels.long()))

    @property
    def are_probabilities(self) -> bool:
        """Whether the scores of each prediction are at least 0 and have the sum 1."""
        scores = self.scores.float()
        return bool((scores >= 0).all() and ((scores.sum(1) - 1).abs() < 1e-3).all())

    @property
    def are_log_probabilities(self) -> bool:
        """Whether the exponentials of the scores of each prediction have the sum 1."""
        return bool((self.scores.float().logsumexp(1).abs() < 1e-3).all())

    def shifted(self, batch: int) -> Classification:
        """Return the predictions of the next label of each of `batch` sequences."""
        scores = self.scores.view(batch, -1, self.classes)[:, :-1].flatten(0, 1)
        return Classification(scores, self.labels.view(batch, -1)[:, 1:].flatten())


def arranged_scores(output: Tensor, labels: object, class_axis_last: bool = False) -> Classification | None:
    """Return `output` and `labels` as a classification, or ``None`` if they have other shapes or dtypes.

    Parameters
    ----------
    output : Tensor
        (sample, class), (sample, class, …), (sample, …, class) or (sample · position, class).
    labels : Tensor
        Integers without the axis of classes.
    class_axis_last : bool
        Prefer the last axis if the shapes allow two axes of classes.

    Examples
    --------
    >>> import torch
    >>> arranged_scores(torch.zeros(2, 3, 5), torch.zeros(2, 5, dtype=torch.long)).classes
    3
    >>> round(arranged_scores(torch.zeros(2, 4), torch.tensor([0, 3])).cross_entropy, 4)
    1.3863
    """
    axis = class_axis(output, labels, class_axis_last)
    if axis is None or not isinstance(labels, Tensor):
        return None
    return Classification(output.detach().movedim(axis, -1).flatten(0, -2), labels.detach().flatten())


def class_axis(output: Tensor, labels: object, last: bool = False) -> int | None:
    """Return the axis of classes of an output, see `arranged_scores`; ``None`` if there is none."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not output.is_floating_point():
        return None
    if output.ndim < 2 or not labels.ndim or not labels.numel():
        return None
    layouts = {
        1: output.shape[:1] + output.shape[2:] == labels.shape,
        output.ndim - 1: output.shape[:-1] == labels.shape or (output.ndim == 2 and len(output) == labels.numel()),
    }
    axes = [axis for axis, fits in layouts.items() if fits and output.shape[axis] > 1]
    return axes[-1 if last else 0] if axes else None


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


_SHAPES = ("View", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Alias", "Clone", "T", "Select", "ToCopy")


def last_operations(node: Any) -> tuple[str, ...]:
    """Return the names of the last operations up to a node of autograd, without those that change only the shape."""
    names: list[str] = []
    while node is not None and len(names) < 2:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name.removeprefix("Unsafe").removeprefix("_") not in _SHAPES:
            names.append(name)
        node = node.next_functions[0][0] if node.next_functions else None
    return tuple(names)
