"""Weights of embeddings and output layers that are one tensor, or that should be."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

Name = TypeVar("Name")


def embedding_pairs(modules: Iterable[tuple[Name, nn.Module]]) -> Iterator[tuple[Name, nn.Module, Name, nn.Module]]:
    """Yield name and module of each embedding and of each linear layer whose weight has the same shape, if both are trainable."""
    known = list(modules)
    embeddings = [(name, module) for name, module in known if isinstance(module, nn.Embedding)]
    layers = [(name, module) for name, module in known if isinstance(module, nn.Linear)]
    for name, embedding in embeddings:
        for other, layer in layers:
            a, b = embedding._parameters.get("weight"), layer._parameters.get("weight")
            if a is not None and b is not None and a.shape == b.shape and a.requires_grad and b.requires_grad:
                yield name, embedding, other, layer


def have_same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same values, and not only one value, as a copy of weights has.

    Examples
    --------
    >>> have_same_values(torch.arange(3.0), torch.arange(3.0)), have_same_values(torch.zeros(3), torch.zeros(3))
    (True, False)
    """
    a, b = a.detach(), b.detach()
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b) and bool((a != a.flatten()[0]).any())
