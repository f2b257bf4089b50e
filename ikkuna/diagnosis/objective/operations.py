"""Finds constant results, masks as indices, and mistakes in the scores of contrastive losses, in operations of objectives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ikkuna.diagnosis.mistakes import (
    CODES_ACROSS_SAMPLES,
    CONSTANT_RESULT,
    LOSS_FLOOR,
    MASK_AS_INDEX,
    OWN_CANDIDATE,
    SOFTMAX_AXIS,
    TRIVIAL_OPTIMUM,
)
from ikkuna.diagnosis.objective.graph import Term, operation
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import saved_by, shape_behind

_MOST_STEPS = 12
_MOST_ELEMENTS = 4_000_000
_NEAR_GUESS = 0.75
_ROUNDING = 1e-4
_ARRANGING_SCORES = ("LogSoftmax", "MaskedFill", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy")


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


_ON_WEIGHTS = ("View", "UnsafeView", "ReshapeAlias", "Expand", "Alias", "ToCopy", "Mul", "NativeDropout")
_ON_SCORES = (*_ON_WEIGHTS, "Div", "Add", "MaskedFill")


def softmaxes_over_other_axes(nodes: Sequence[Any]) -> Iterator[tuple[Any, Finding]]:
    """Yield the softmaxes of attentions of positions to each other over another axis than that of the keys, with a finding.

    The scores are a product of matrices, and the weights are the left side of another one.  Weights that something else divides or
    transposes in between are left out, as are those of more or fewer queries than keys: slots compete for their inputs on purpose.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> x = torch.randn(2, 4, 3, requires_grad=True)
    >>> graphs = [ObjectiveGraph([((x @ x.mT).softmax(axis) @ x).sum()]) for axis in (1, 2)]
    >>> [[found.rule for _, found in softmaxes_over_other_axes(graph.nodes)] for graph in graphs]
    [['softmax_axis'], []]
    """
    for node in nodes:
        softmax = _first_behind(node, _ON_WEIGHTS) if operation(node) == "Bmm" else None
        if softmax is None or operation(softmax) not in ("Softmax", "SafeSoftmax"):
            continue
        shape, axis = shape_behind(softmax) or (), saved_by(softmax, "dim")
        if (
            axis is None
            or len(shape) < 3
            or shape[-1] != shape[-2]
            or shape[axis] < 2
            or axis % len(shape) == len(shape) - 1
        ):
            continue
        scores = _first_behind(softmax, _ON_SCORES)
        if scores is not None and operation(scores) == "Bmm":
            yield softmax, SOFTMAX_AXIS.found(detail=f"It is over axis {axis % len(shape)} of the shape {shape}.")


def _first_behind(node: Any, passed: tuple[str, ...]) -> Any:
    """Return the first operation behind a node that is none of `passed`, or has several arguments with a gradient."""
    node = node.next_functions[0][0]
    for _ in range(_MOST_STEPS):
        is_single = node is not None and sum(behind is not None for behind, _ in node.next_functions) == 1
        if not is_single or operation(node) not in passed:
            return node
        node = next(behind for behind, _ in node.next_functions if behind is not None)
    return None


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


def pairs_without_difference(nodes: Sequence[Any]) -> bool:
    """Return whether a log-sigmoid gets a difference that is exactly 0 everywhere, in float32 or more.

    That of a policy and its reference is so before the first update, and later if the reference is the policy itself.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> x = torch.randn(3, requires_grad=True)
    >>> losses = [torch.nn.functional.logsigmoid(0.1 * (x - old)).sum() for old in (x.detach(), x.detach() + 1)]
    >>> [pairs_without_difference(ObjectiveGraph([loss]).nodes) for loss in losses]
    [True, False]
    """
    for node in nodes:
        given = saved_by(node, "self") if operation(node) == "LogSigmoid" else None
        if isinstance(given, Tensor) and given.is_cpu and given.element_size() > 2 and not bool(given.any()):
            source = _first_behind(node, _ON_SCORES)
            return source is not None and operation(source) == "Sub"
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


# -- contrastive objectives --------------------------------------------------------------------------------------------


def contrasts(nodes: Sequence[Any]) -> Iterator[Finding]:
    """Find mistakes in the scores of each cross-entropy of class indices."""
    for node in nodes:
        if operation(node) != "NllLoss":
            continue
        scores, labels = saved_by(node, "self"), saved_by(node, "target")
        if scores is None or labels is None or not scores.is_cpu or scores.numel() > _MOST_ELEMENTS:
            continue
        yield from own_candidate(scores.float(), labels)
        product, scale = product_of_scores(node)
        if product is None:
            continue
        yield from codes_across_samples(product)
        largest = _largest_product(product)
        if largest is not None and scale is not None:
            yield from cosine_floor(scores.shape[1], scale * largest)


def own_candidate(scores: Tensor, labels: Tensor) -> Iterator[Finding]:
    """Find rows of symmetric similarities whose largest one is that with themselves, which is never the label.

    Parameters
    ----------
    scores : Tensor of shape (row, candidate)
        Logarithms of probabilities, which are the similarities but for a number for each row.
    labels : Tensor of shape (row,)
        The candidates to be found.

    Examples
    --------
    >>> codes = torch.nn.functional.normalize(torch.randn(6, 4), dim=1)
    >>> similar = (codes @ codes.T / 0.1).log_softmax(1)
    >>> [found.rule for found in own_candidate(similar, torch.arange(6).roll(3))]
    ['own_candidate']
    """
    count = len(scores)
    if scores.shape != (count, count) or count < 4 or labels.shape != (count,):
        return
    diagonal, rows = scores.diagonal(), torch.arange(count, device="cpu")
    if bool((labels == rows).any()) or not bool(scores.isfinite().all()):
        return
    if not bool((diagonal[:, None] >= scores - _ROUNDING).all()):
        return
    odd = (
        scores - scores.T
    )  # of symmetric similarities it is the difference of a number of the column and one of the row
    rest = odd - (odd[:1, :] - odd[:1, :].T)
    scale = float((scores - scores.mean(1, keepdim=True)).abs().max())
    if scale > 0 and float(rest.abs().max()) < 1e-3 * scale:
        probability = float(diagonal.exp().mean())
        yield OWN_CANDIDATE.found(probability)


def product_of_scores(node: Any) -> tuple[Any, float | None]:
    """Return the node of the product of matrices that are the scores of a cross-entropy, and the size of the factor behind it.

    Returns
    -------
    tuple of (object, float or None)
        ``None`` in place of the node for other scores, and in place of the factor if it is learned, so that it can grow.

    Examples
    --------
    >>> a, b = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    >>> loss = torch.nn.functional.cross_entropy(a @ b.T / -0.5, torch.arange(4))
    >>> node, factor = product_of_scores(loss.grad_fn)
    >>> operation(node), factor
    ('Mm', 2.0)
    """
    scale: float | None = 1.0
    for _ in range(_MOST_STEPS):
        node = node.next_functions[0][0] if node.next_functions else None
        name = "" if node is None else operation(node)
        if name == "Mm":
            return node, None if scale is None else abs(scale)
        if name in ("Mul", "Div"):
            factor = _number(saved_by(node, "other"))
            is_learned = len([behind for behind, _ in node.next_functions if behind is not None]) > 1
            scale = (
                None if is_learned or not factor or scale is None else scale * (factor if name == "Mul" else 1 / factor)
            )
        elif name not in _ARRANGING_SCORES:
            break
    return None, None


def codes_across_samples(product: Any) -> Iterator[Finding]:
    """Find a product of codes whose columns all have the length 1, and whose rows, which are the codes, have various ones.

    Examples
    --------
    >>> codes = torch.nn.functional.normalize(torch.randn(6, 4, requires_grad=True), dim=0)
    >>> [found.rule for found in codes_across_samples((codes @ codes.T).grad_fn)]
    ['codes_across_samples']
    """
    left, right = saved_by(product, "self"), saved_by(product, "mat2")
    if left is None or right is None or not left.is_cpu or min(left.shape) < 2 or right.shape[1] < 2:
        return
    across = [left.float().norm(dim=0), right.float().norm(dim=1)]
    along = left.float().norm(dim=1)
    if all(bool(((x - 1).abs() < _ROUNDING).all()) for x in across) and bool(((along - along[0]).abs() > 0.01).any()):
        yield CODES_ACROSS_SAMPLES.found()


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    is_number = isinstance(value, Tensor) and value.is_cpu and value.numel() == 1
    return float(value) if is_number else None


def _largest_product(node: Any) -> float | None:
    """Return the largest product of a row and a column if all rows and all columns have one length each."""
    left, right = saved_by(node, "self"), saved_by(node, "mat2")
    if left is None or right is None or shape_behind(node) is None or not left.numel():
        return None
    lengths = left.float().norm(dim=1), right.float().norm(dim=0)
    ends = [x.aminmax() for x in lengths]
    if any(float(high - low) > _ROUNDING * float(high) for low, high in ends):
        return None
    return float(ends[0].max * ends[1].max)


def cosine_floor(candidates: int, bound: float) -> Iterator[Finding]:
    """Find scores between -`bound` and `bound` with which a cross-entropy stays near a guess, whatever the outputs are.

    Examples
    --------
    >>> [found.value for found in cosine_floor(64, 0.01)], list(cosine_floor(64, 10.0))
    ([4.139...], [])
    """
    if candidates < 2:
        return
    least = math.log1p((candidates - 1) * math.exp(-2 * bound))
    if least > _NEAR_GUESS * math.log(candidates):
        detail = f"The scores are cosines times {bound:.3g}, and a guess has {math.log(candidates):.3g}."
        advice = "divide the cosines by a temperature such as 0.1, not multiply them by it"
        yield LOSS_FLOOR.found(least, detail=detail, advice=advice)
