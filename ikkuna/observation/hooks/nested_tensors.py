"""Finds the tensors in what a module returns or receives."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_DEPTH = 8

Leaves = list[tuple[str, Tensor]]


def leaves(value: Any) -> Leaves:
    """Return each tensor in nested tuples, lists, mappings and dataclasses once, with its path.

    The path joins positions, keys and field names with dots.  The path of the first tensor of (nested) tuples is empty,
    because the first output of a module has the module's own name.

    Examples
    --------
    >>> import torch
    >>> out, hidden = torch.nn.LSTM(2, 3)(torch.zeros(4, 1, 2))
    >>> [path for path, _ in leaves((out, hidden))]
    ['', '1.0', '1.1']
    """
    if isinstance(value, Tensor):
        return [("", value)]
    found: Leaves = []
    _walk(value, "", True, 0, found)
    return found


def _walk(value: Any, path: str, is_first: bool, depth: int, found: Leaves) -> None:
    """Append to `found`.  The compiler traces plain calls and lists, but not generators."""
    if isinstance(value, PackedSequence):
        value = value.data
    if isinstance(value, Tensor):
        if not any(value is known for _, known in found):
            found.append(("" if is_first else path, value))
    elif depth < _DEPTH:
        for key, part in _items(value):
            below = f"{path}.{key}" if path else str(key)
            _walk(part, below, is_first and key == 0, depth + 1, found)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def batch_sizes(value: Any) -> Tensor | None:
    """Return the number of sequences at each timestep if the first output of a module is a packed sequence.

    Examples
    --------
    >>> import torch
    >>> from torch import ones
    >>> batch_sizes((torch.nn.utils.rnn.pack_sequence([ones(3, 1), ones(1, 1)]), "hidden"))
    tensor([2, 1, 1])
    """
    if isinstance(value, Tensor):
        return None
    while isinstance(value, tuple | list) and value and not isinstance(value, PackedSequence):
        value = value[0]
    return value.batch_sizes if isinstance(value, PackedSequence) else None


def with_batch_sizes(tensor: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the data of a packed sequence with its `sizes` as the attribute ``batch_sizes``, which locates timesteps."""
    if sizes is not None:
        tensor = tensor.detach()
        tensor.batch_sizes = sizes  # type: ignore[attr-defined]
    return tensor


def received(args: Any, outputs: Leaves) -> Leaves:
    """Return the tensors that a module was called with, without those that it has overwritten with its outputs."""
    return [(path, tensor) for path, tensor in leaves(args) if not any(tensor is output for _, output in outputs)]
