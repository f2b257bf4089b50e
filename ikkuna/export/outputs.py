"""Find the tensors in whatever a module returns or receives."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["leaves"]

_DEPTH = 8


def leaves(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a nest of tuples, lists, mappings and dataclasses once, with its path.

    The path joins positions, keys and field names with dots.  One made of zeros alone is the first of a tuple, and empty:
    what a module returns first goes under the module's own name.

    Examples
    --------
    >>> import torch
    >>> out, hidden = torch.nn.LSTM(2, 3)(torch.zeros(4, 1, 2))
    >>> [path for path, _ in leaves((out, hidden))]
    ['', '1.0', '1.1']
    """
    if isinstance(value, Tensor):
        yield "", value
        return
    seen: set[int] = set()
    for parts, tensor in _walk(value, (), 0):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield "" if all(part == "0" for part in parts) else ".".join(parts), tensor


def _walk(value: Any, parts: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield parts, value
    elif isinstance(value, PackedSequence):
        yield parts, value.data
    elif depth < _DEPTH:
        for key, part in _items(value):
            yield from _walk(part, (*parts, str(key)), depth + 1)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
