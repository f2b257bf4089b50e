"""A batch: its inputs and labels, and the axis of samples of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ikkuna.errors import ConfigTypeError
from ikkuna.support.torch_internals import pytree

_LABELS = ("labels", "label", "targets", "target", "y")


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one batch.

    Parameters
    ----------
    inputs : object
        What the model is called with: one value, a tuple of arguments, or a dictionary of named arguments.
    labels : object
        What the loss is called with, besides the output; ``None`` without labels.
    loss_inside : bool
        Whether the labels are among the named inputs, because the model computes the loss.
    """

    inputs: Any
    labels: Any = None
    loss_inside: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the inputs, without the labels."""
        return tensors_of(self.inputs if not self.loss_inside else without_labels(self.inputs))

    @property
    def size(self) -> int | None:
        """The number of samples; ``None`` if no tensor shows it.

        The labels decide whether the first or the second axis of the inputs is that of the samples.
        """
        inputs, labels = ([t for t in tensors if t.ndim] for tensors in (self.tensors, tensors_of(self.labels)))
        if not inputs:
            return labels[0].shape[0] if labels else None
        known = labels[0].shape[0] if labels else None
        return known if sample_axis(inputs[0], known) is not None else inputs[0].shape[0]

    def copy(self, device: torch.device | None = None) -> Batch:
        """Return a batch with copies of the tensors, because a model may change its inputs in place."""
        return self.map(lambda tensor: tensor.detach().to(device or tensor.device, copy=True))

    def map(self, function: Callable[[Tensor], Tensor], labels: bool = True) -> Batch:
        """Return a batch with `function` of each tensor; ``labels=False`` leaves separate labels unchanged."""
        changed = _map(function, self.labels) if labels else self.labels
        return replace(self, inputs=_map(function, self.inputs), labels=changed)

    def unlabelled(self) -> Batch:
        """Return a batch with which the model does not compute the loss."""
        return replace(self, inputs=without_labels(self.inputs), loss_inside=False)


def split_batch(batch: Any, has_loss: bool) -> Batch:
    """Return the inputs and the labels of `batch`.

    Parameters
    ----------
    batch : object
        A tensor, ``(inputs, labels)``, ``(input, input, …, labels)``, or a dictionary of named inputs.
    has_loss : bool
        Whether there is a loss function.  Without one, a model with named inputs computes its loss itself.

    Raises
    ------
    ConfigTypeError
        If `batch` is a data loader or another iterator.

    Examples
    --------
    >>> x, y = torch.zeros(2, 3), torch.zeros(2)
    >>> split_batch((x, y), True).labels.shape
    torch.Size([2])
    >>> split_batch({"input_ids": x, "labels": y}, False).loss_inside
    True
    """
    if isinstance(batch, Mapping):
        named = dict(batch)
        name = next((name for name in _LABELS if named.get(name) is not None), "")
        if not has_loss:
            return Batch(named, named.get("labels"), loss_inside=True)
        return Batch({key: value for key, value in named.items() if key != name}, named.get(name))
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields") and not isinstance(batch, PackedSequence):
        *inputs, labels = batch if len(batch) > 1 else (*batch, None)
        return Batch(inputs[0] if len(inputs) == 1 else tuple(inputs), labels)
    if isinstance(batch, Iterator) or hasattr(batch, "batch_sampler"):
        raise ConfigTypeError(f"batch must be one batch, got a {type(batch).__name__}; pass next(iter(loader))")
    return Batch(batch)


def sample_axis(tensor: Tensor, size: int | None) -> int | None:
    """Return the axis of samples: the first or the second one that has `size` elements."""
    return next((axis for axis in range(min(tensor.ndim, 2)) if tensor.shape[axis] == size), None)


def by_sample(tensor: Tensor, size: int | None, preferred: int = 0) -> Tensor | None:
    """Return `tensor` with the axis of samples first, or ``None`` if it has none.

    Parameters
    ----------
    tensor : Tensor
        (sample, …), (…, sample, …) or, with samples and positions in one axis, (sample · position, …).
    size : int, optional
        The number of samples.
    preferred : int
        The axis of samples if several fit: 0 or 1.

    Examples
    --------
    >>> by_sample(torch.zeros(6, 5), 2).shape
    torch.Size([2, 3, 5])
    """
    if not size or not tensor.ndim:
        return None
    if tensor.ndim > preferred and tensor.shape[preferred] == size:
        return tensor.movedim(preferred, 0)
    axis = sample_axis(tensor, size)
    if axis is not None:
        return tensor.movedim(axis, 0)
    if tensor.shape[0] % size or not tensor.shape[0]:
        return None
    if preferred:
        return tensor.reshape(-1, size, *tensor.shape[1:]).movedim(1, 0)
    return tensor.reshape(size, -1, *tensor.shape[1:])


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value."""
    found: list[Tensor] = []
    _map(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def without_labels(inputs: Any) -> Any:
    """Return named inputs without labels."""
    return {name: value for name, value in inputs.items() if name not in _LABELS}


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    def one(item: Any) -> Any:
        if isinstance(item, PackedSequence):
            return item._replace(data=function(item.data))
        return function(item) if isinstance(item, Tensor) else item

    return pytree.tree_map(one, value, is_leaf=lambda item: isinstance(item, PackedSequence))


def is_shifted(labels: Tensor, tokens: Tensor, axis: int) -> bool:
    """Return whether each label but the last is the token of the next position of an axis.

    Examples
    --------
    >>> tokens = torch.tensor([[5, 6, 7], [1, 2, 3]])
    >>> is_shifted(torch.tensor([[6, 7, 8], [2, 3, 4]]), tokens, 1), is_shifted(tokens, tokens, 1)
    (True, False)
    """
    if labels.shape != tokens.shape or not -tokens.ndim <= axis < tokens.ndim or tokens.shape[axis] < 2:
        return False
    length = tokens.shape[axis] - 1
    return torch.equal(labels.narrow(axis, 0, length), tokens.narrow(axis, 1, length))


def share_between_samples(output: Tensor, size: int | None) -> float:
    r"""Return the share of an output's energy that differs between samples.

    :math:`1 - \lVert\bar h\rVert^2 / \overline{\lVert h_n\rVert^2}` with the output :math:`h_n` of sample :math:`n`.
    NaN if the output has no axis of `size` samples, if `size` is below 2, or if all elements are 0.

    Examples
    --------
    >>> share_between_samples(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), 2)
    0.0
    >>> share_between_samples(torch.tensor([[1.0], [-1.0]]), 2)
    1.0
    """
    arranged = by_sample(output.detach(), size)
    if arranged is None or len(arranged) < 2 or not output.numel():
        return math.nan
    samples = widened(arranged.reshape(len(arranged), -1))
    energy = samples.square().sum(1).mean()
    differing = (samples - samples.mean(0)).square().sum(1).mean()
    return float(differing / energy) if energy > 0 else math.nan


def widened(x: Tensor) -> Tensor:
    """Return `x` in a dtype in which squares do not overflow; some accelerators have no float64."""
    return x.double() if x.device.type == "cpu" else x.float()
