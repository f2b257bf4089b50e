"""Finds whether a loss is that of the watched model."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.distributed.rendezvous import World
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.nested_tensors import Leaves, leaves
from ikkuna.support.torch_internals import Memory, memory_of, nodes_behind, number_of_node

_MOST_KEPT = 16  # forwards, and outputs, to which a loss may belong
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
    """Yield the nodes of a graph, the nearest first: a penalty may be as large as the model, but both are added near the end."""
    return nodes_behind(x.grad_fn if isinstance(x, Tensor) else x.node for x in losses)


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


class LossOwner:
    """Finds whether a call of the loss module is one for the watched model, or for another that is called beside it.

    In a training step the graph of the loss shows that, see `is_of_another_model`.  Without a graph, although the model has recorded one,
    the loss is that of a teacher or the like, unless the module received what the model has returned.  What a model returns that is never
    called as a whole is not known: there it must have received something with a graph.
    In an evaluation it is that of another model, as of an average of the weights, if the module received nothing that the model has
    returned, although it has received that in evaluations before.

    Parameters
    ----------
    context : HookContext
        Knows the parameters of the model.
    """

    def __init__(self, context: HookContext) -> None:
        self._context = context
        self._recorded: deque[range] = deque(maxlen=_MOST_KEPT)  # in the open step, as what follows
        self._returned: deque[Memory] = deque(maxlen=_MOST_KEPT)
        self._evaluated: deque[Memory] = deque(maxlen=_MOST_KEPT)
        self._evaluates_outputs = False

    def forward_ended(self, outputs: Leaves, recorded: range) -> None:
        """Remember the memory of what a forward has returned, and the numbers of the nodes recorded in it."""
        if recorded:
            self._recorded.append(recorded)
        self._returned += _memories(outputs)

    def evaluated(self, output: Any) -> None:
        """Remember the memory of what the model has returned without gradients."""
        if self._context.model.loss is not None:
            self._evaluated += _memories(leaves(output))

    def step_ended(self) -> None:
        """Forget the forwards of the step."""
        self._recorded.clear()
        self._returned.clear()

    def is_another(self, loss: Tensor, arguments: Sequence[Any], is_training: bool) -> bool:
        """Return whether a loss is shown to be that of another model; `arguments` are what its module was called with."""
        if is_training:
            return self.is_another_in_step(loss, arguments, self._recorded, self._returned)
        if torch.is_grad_enabled():
            return False
        is_own = any(share_memory(x, self._evaluated) for x in arguments if isinstance(x, Tensor))
        self._evaluates_outputs = self._evaluates_outputs or is_own
        return self._evaluates_outputs and not is_own

    def is_another_in_step(
        self, loss: Tensor, arguments: Sequence[Any], recorded: Sequence[range], outputs: Collection[Memory]
    ) -> bool:
        """Return the same of a training step whose forwards have recorded these nodes and returned these outputs."""
        context, own = self._context, self._context.parameters.ids
        if not recorded and (context.model.stages or World.here().size > 1 or context.parameters.are_frozen()):
            return False  # parameters that a rank has gathered are no longer those of the model
        if loss.requires_grad:
            return is_of_another_model(loss, recorded, outputs, own)
        if torch.is_grad_enabled() or not (recorded or context.tracker.is_rootless):
            return False
        for x in arguments:
            if isinstance(x, Tensor) and (x.requires_grad or share_memory(x, outputs)):
                return x.requires_grad and is_of_another_model(x, recorded, outputs, own)
        return True


def _memories(outputs: Leaves) -> list[Memory]:
    """Return weak references to the memory of the first tensors of an output."""
    found = [memory_of(tensor) for _, tensor in outputs[:_MOST_KEPT]]
    return [memory for memory in found if memory is not None]
