"""Finds operations whose result is the same for every input, and masks that are used as indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ikkuna.diagnosis.mistakes import CONSTANT_RESULT, MASK_AS_INDEX, TRIVIAL_OPTIMUM
from ikkuna.diagnosis.objective.graph import Term, operation
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import saved_by, shape_behind

_MOST_STEPS = 12


def constant_results(nodes: Sequence[Any]) -> Iterator[tuple[Any, Finding]]:
    """Yield the nodes of softmaxes and normalisations over one element, with a finding.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> scores = torch.nn.Linear(3, 1)(torch.randn(4, 3))
    >>> [(_, found)] = constant_results(ObjectiveGraph([scores.softmax(1).sum()]).nodes)
    >>> found.rule
    'constant_result'
    """
    for node in nodes:
        reason = _over_one(node)
        if reason and math.prod(shape_behind(node) or ()) > 1:
            yield node, CONSTANT_RESULT.found(detail=reason)


def _over_one(node: Any) -> str:
    name, shape = operation(node), shape_behind(node)
    if name in ("Softmax", "SafeSoftmax") and shape:
        axis = saved_by(node, "dim")
        if axis is not None and shape[axis] == 1:
            return f"A softmax over axis {axis % len(shape)} of the shape {shape} has one element, and is always 1."
    elif name == "NativeLayerNorm" and math.prod(saved_by(node, "normalized_shape") or (0,)) == 1:
        return "A layer normalisation over one element subtracts this element from itself."
    elif name == "NativeGroupNorm":
        channels, groups, size = (saved_by(node, key) for key in ("C", "group", "HxW"))
        if channels and groups and channels // groups * size == 1:
            return "A group normalisation over one element subtracts this element from itself."
    return ""


def ratios_of_one(nodes: Sequence[Any]) -> bool:
    """Return whether the exponential of a difference is exactly 1 everywhere, although both of its sides have a gradient.

    The gradients of the two sides then cancel, as those of log-probabilities and old ones that were not detached.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> x = torch.randn(3, requires_grad=True)
    >>> [ratios_of_one(ObjectiveGraph([(x - old).exp().sum()]).nodes) for old in (x * 1, (x * 1).detach())]
    [True, False]
    """
    for node in nodes:
        if operation(node) != "Exp":
            continue
        difference = node.next_functions[0][0]
        if difference is None or operation(difference) != "Sub":
            continue
        result = saved_by(node, "result")
        are_tracked = all(behind is not None for behind, _ in difference.next_functions)
        if (
            are_tracked
            and isinstance(result, Tensor)
            and result.is_cpu
            and result.numel() > 1
            and bool((result == 1).all())
        ):
            return True
    return False


def masks_as_indices(nodes: Sequence[Any]) -> Iterator[Finding]:
    """Find results of layers that are indexed by integers of 0 and 1, as many as there are rows.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> scores, mask = torch.nn.Linear(3, 2)(torch.randn(5, 3)), torch.tensor([0, 1, 1, 0, 1])
    >>> [found.rule for found in masks_as_indices(ObjectiveGraph([scores[mask].sum()]).nodes)]
    ['mask_as_index']
    """
    for node in nodes:
        if operation(node) != "Index":
            continue
        sizes, indices = saved_by(node, "self_sym_sizes"), saved_by(node, "indices")
        source = node.next_functions[0][0]
        if sizes is None or not isinstance(indices, tuple) or source is None or hasattr(source, "variable"):
            continue
        for size, index in zip(sizes, indices, strict=False):
            if isinstance(index, Tensor) and _is_mask(index, size):
                yield MASK_AS_INDEX.found(detail=f"There are {size} indices for {size} rows, all of them 0 or 1.")
                return


def _is_mask(index: Tensor, size: int) -> bool:
    if not index.is_cpu or index.is_floating_point() or index.element_size() == 1 or index.ndim != 1:
        return False
    return index.numel() == size > 4 and index.unique().tolist() == [0, 1]


# -- objectives without a need to differ -------------------------------------------------------------------------------

_RESHAPING = (
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "ToCopy", "Clone", "Slice", "Select"),
    *("Split", "Div"),
)
_DISTANCES = ("MseLoss", "SmoothL1Loss", "HuberLoss", "Pow", "Abs")


def trivial_optimum(terms: list[Term], outputs: Sequence[Tensor]) -> Iterator[Finding]:
    """Find an objective all of whose terms draw outputs of the network, both with a gradient, towards each other.

    Parameters
    ----------
    terms : list of Term
        The terms of the objective.
    outputs : sequence of Tensor
        What the network has returned.
    """
    known = {x.grad_fn for x in outputs if x.grad_fn is not None and operation(x.grad_fn) != "NativeBatchNorm"}
    if terms and len(known) > 1 and all(_draws_together(each, known) for each in terms):
        yield TRIVIAL_OPTIMUM.found()


def _draws_together(term: Term, known: set[Any]) -> bool:
    """Return whether a term is a distance of two outputs with a positive factor, or their cosine with a negative one."""
    name, node = operation(term.node), term.node
    if name == "Mul":
        are_directions = all(behind is not None and operation(behind) == "Div" for behind, _ in node.next_functions)
        return term.high < 0 and are_directions and _of_two(node, known)
    if name not in _DISTANCES or term.low <= 0:
        return False
    if name in ("Pow", "Abs"):
        node = node.next_functions[0][0]
        if node is None or operation(node) != "Sub":
            return False
    return _of_two(node, known)


def _of_two(node: Any, known: set[Any]) -> bool:
    """Return whether the two arguments of a node are different outputs of the network, or their directions."""
    sources = [_output_behind(behind, known) for behind, _ in node.next_functions]
    return len(sources) == 2 and None not in sources and sources[0] is not sources[1]


def _output_behind(node: Any, known: set[Any]) -> Any:
    for _ in range(_MOST_STEPS):
        if node is None or node in known:
            return node
        if operation(node) not in _RESHAPING:
            return None
        node = node.next_functions[0][0]
    return None
