"""Finds whether the graph of a loss is that of the watched model."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.support.torch_internals import Memory, memory_of, number_of_node

_MOST_NODES = 1024  # a walk of half a millisecond
_Opaque = torch.autograd.function.BackwardCFunction
"""The node of a function of the user's own, which may compute anything with a graph of its own, as a checkpoint does."""


def is_computed_in(losses: Sequence[Any], recorded: range) -> bool | None:
    """Return whether losses are functions of what was computed while autograd has recorded the nodes with these numbers.

    ``None`` if their graph is too large, or this version of torch does not number nodes.

    Examples
    --------
    >>> from ikkuna.support.torch_internals import sequence_number
    >>> x = torch.ones(1, requires_grad=True)
    >>> before, y, behind = sequence_number(), x.exp(), sequence_number()
    >>> is_computed_in([y.log()], range(before, behind)), is_computed_in([x.log()], range(before, behind))
    (True, False)
    """
    for count, node in enumerate(_nodes_of(losses)):
        number = number_of_node(node)
        if number in recorded:
            return True
        if number < 0 or count == _MOST_NODES:
            return None
    return False


def _nodes_of(losses: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, along the first branches, which usually lead to the outputs of the model."""
    waiting, seen = [x.grad_fn if isinstance(x, Tensor) else x.node for x in losses], set[Any]()
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        yield node
        for behind, _ in reversed(node.next_functions):
            waiting.append(behind)


def is_of_another_model(
    loss: Tensor, recorded: Sequence[range], outputs: Collection[Memory], own: Callable[[], set[int]]
) -> bool:
    """Return whether the graph of a loss shows that it is a function of other parameters, and not of a model.

    Parameters
    ----------
    loss : Tensor
        The loss.
    recorded : sequence of range
        The numbers of the nodes that autograd has recorded in forwards of the model.
    outputs : collection of Memory
        The memory of what these have returned; a loss that begins there is one of the model.
    own : callable
        Returns the ids of the parameters of the model.

    Examples
    --------
    >>> model, other, x = nn.Linear(2, 1), nn.Linear(2, 1), torch.ones(1, 2)
    >>> def own():
    ...     return {id(parameter) for parameter in model.parameters()}
    >>> [is_of_another_model(y.sum(), [], [], own) for y in (model(x), other(x), model(x) + other(x), x)]
    [False, True, False, False]
    """
    leaves = list[Tensor]()
    for count, node in enumerate(_nodes_of([loss])):
        number = number_of_node(node)
        is_opaque = isinstance(node, _Opaque) and "CompiledFunction" not in type(node).__name__
        if is_opaque or number < 0 or count == _MOST_NODES or any(number in nodes for nodes in recorded):
            return False
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
    if not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return False
    return own().isdisjoint(map(id, leaves)) and not any(share_memory(leaf, outputs) for leaf in leaves)


def share_memory(x: Tensor, memories: Collection[Memory]) -> bool:
    """Return whether a tensor has one of several memories, or one that is not known.

    Examples
    --------
    >>> x = torch.ones(3)
    >>> memories = [memory_of(x)]
    >>> share_memory(x[1:], memories), share_memory(x + 1, memories), share_memory(x, [])
    (True, False, False)
    """
    own = memory_of(x)
    return own is None or own in memories
