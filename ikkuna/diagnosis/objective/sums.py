"""Finds mistakes in the terms of an objective: signs, reductions, shapes, and arguments of losses of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ikkuna.diagnosis.mistakes import ENTROPY_PUNISHED, LABEL_SHAPE, MIXED_REDUCTION, UNBOUNDED_LOSS
from ikkuna.diagnosis.objective.graph import Term, arguments_of, operation
from ikkuna.diagnosis.preflight_checks.contracts import LossCall, loss_calls
from ikkuna.diagnosis.preflight_checks.outputs import last_operations
from ikkuna.store.finding import Finding
from ikkuna.support.saved_losses import loss_of_node
from ikkuna.support.torch_internals import saved_by, shape_behind

_MOST_LOSSES = 16
_MOST_ELEMENTS = 1_000_000


def losses_in(nodes: list[Any], outputs: list[Tensor]) -> list[LossCall]:
    """Return the calls of losses of torch that an objective is computed from, as far as the graph has saved their arguments.

    Parameters
    ----------
    nodes : list
        The nodes of the objective.
    outputs : list of Tensor
        What the network has returned.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> scores, teacher = torch.zeros(2, 3, requires_grad=True).exp(), torch.full((2, 3), 1 / 3)
    >>> divergence = torch.nn.functional.kl_div(scores.softmax(1), teacher, reduction="batchmean")
    >>> [call.name for call in losses_in(ObjectiveGraph([divergence + scores.mean()]).nodes, [])]
    ['kl_div']
    """
    found: list[LossCall] = []
    for node in nodes:
        saved = loss_of_node(node, outputs) if len(found) < _MOST_LOSSES else None
        if saved is None or not saved.outputs.is_cpu or saved.outputs.numel() > _MOST_ELEMENTS:
            continue
        given = saved.outputs.detach().requires_grad_()
        with loss_calls() as calls:
            saved.loss(given, saved.labels)
        found += [call.behind({given.data_ptr(): last_operations(saved.behind)}) for call in calls]
    return found


# -- terms without a bound ---------------------------------------------------------------------------------------------


def _exponent(node: Any) -> float:
    """Return how a power grows; NaN for one that may be negative or that is not known."""
    exponent = saved_by(node, "exponent")
    is_even = isinstance(exponent, int | float) and exponent > 0 and exponent % 2 == 0
    return float(exponent) if is_even else math.nan


def _constant(growth: float) -> Callable[[Any], float]:
    return lambda node: growth


_GROWTH: dict[str, Callable[[Any], float]] = {
    "Pow": _exponent,
    "Exp": _constant(math.inf),
    **dict.fromkeys(("MseLoss", "Var"), _constant(2)),
    **dict.fromkeys(("SmoothL1Loss", "HuberLoss", "Abs", "LinalgVectorNorm", "Norm", "Std"), _constant(1)),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"), _constant(1)),
    **dict.fromkeys(("LogSoftmax", "LogSigmoid", "Softplus", "Relu", "ClampMin", "SoftMarginLoss"), _constant(1)),
    **dict.fromkeys(("Addmm", "Mm", "Bmm", "Convolution", "Embedding", "NativeLayerNorm", "AccumulateGrad"), _constant(1)),
    **dict.fromkeys(("Sigmoid", "Tanh", "Softmax"), _constant(0)),
}  # fmt: skip
"""How fast functions grow in their arguments: the exponent, 0 for a bounded one.  Those not listed may grow as fast as any."""

_CONVEX = ("Pow", "Exp", "MseLoss", "Var")  # they grow in every direction, or to infinity in one
_LOGARITHMS = ("LogSoftmax", "Logsumexp", "Log")
_BOUNDING = ("Clamp", "ClampMin", "Add", "Alias", "Clone")
_FREE = ("Addmm", "Mm", "Convolution", "Embedding")  # results that weights can make any number


def _growth(term: Term) -> float:
    found = _GROWTH.get(_name(term.node), _constant(math.nan))(term.node)
    return math.inf if math.isnan(found) else found


def _name(node: Any) -> str:
    return operation(node).rpartition("::")[2]


def unbounded(terms: list[Term], samples: int | None) -> Iterator[Finding]:
    """Find a term with a negative factor that grows faster than all others, in an argument that can be any number.

    Factors that differ between elements, and those of a single sample, are not judged: rewards are such factors.
    """
    convex = (each for each in terms if each.low == each.high < 0 and _name(each.node) in _CONVEX)
    negative = [each for each in convex if each.reduction or _is_of_samples(each.node, samples)]
    others = [each for each in terms if not (each.low < 0 and each.high < 0) and each.high != 0]
    bound = max(map(_growth, others), default=0.0)
    for each in negative:
        growth = _GROWTH[_name(each.node)](each.node)
        if growth > bound and _is_free(each.node):
            name = {"Pow": "a power", "Exp": "an exponential", "MseLoss": "a squared error", "Var": "a variance"}
            detail = f"It contains {name[_name(each.node)]} with a negative factor ({each.high:.3g}), and nothing in it grows as fast."
            yield UNBOUNDED_LOSS.found(each.high, detail=detail)
            return


def _is_of_samples(node: Any, samples: int | None) -> bool:
    shape = shape_behind(node)
    return bool(shape) and samples is not None and samples > 1 and shape[0] == samples  # type: ignore[index]


def _is_free(node: Any) -> bool:
    """Return whether all arguments of a function are sums of results that weights can make any number."""
    arguments = arguments_of(node)
    return bool(arguments) and all(_name(each) in _FREE for each in arguments or ())


def entropy_punished(terms: list[Term]) -> Iterator[Finding]:
    """Find an entropy that the objective makes smaller beside log-probabilities with factors of both signs, as rewards are.

    Without rewards a smaller entropy can be the aim, as that of predictions for samples without labels.
    """
    rewards = any(each.low < 0 < each.high and _name(each.node) in _LOGARITHMS for each in terms)
    for each in terms if rewards else ():
        if each.low == each.high < 0 and _name(each.node) == "Mul" and _is_entropy(each.node):
            samples = (shape_behind(each.node) or (1,))[0]
            yield ENTROPY_PUNISHED.found(-each.high * samples)
            return


def _is_entropy(node: Any) -> bool:
    """Return whether a product is that of probabilities and their logarithms."""
    sides = [_first_of(behind, _BOUNDING) for behind, _ in node.next_functions]
    if len(sides) != 2 or None in sides:
        return False
    names = [_name(each) for each in sides]
    probabilities = [name for name in names if name in ("Softmax", "Exp", "Div")]
    return len(probabilities) == 1 and any(name in (*_LOGARITHMS, "Sub") for name in names)


def _first_of(node: Any, skipped: tuple[str, ...]) -> Any:
    """Return the first operation behind a node that is none of `skipped`."""
    while node is not None and _name(node) in skipped and node.next_functions:
        node = node.next_functions[0][0]
    return node


# -- reductions --------------------------------------------------------------------------------------------------------


def mixed_reduction(terms: list[Term], of_data: Callable[[Any], bool]) -> Iterator[tuple[Any, Finding]]:
    """Find a sum over the samples beside a mean over them, whose factor does not make up for the number of samples.

    The node is that of the sum.

    Parameters
    ----------
    terms : list of Term
        The terms.
    of_data : callable
        Returns whether a node was computed in a forward pass of the model, and not from parameters alone.
    """
    sums = [each for each in terms if each.reduction == "sum" and of_data(each.node)]
    means = [each for each in terms if each.reduction == "mean" and of_data(each.node)]
    if not sums or not means:
        return
    least, most = min(abs(each.factor) for each in sums), max(abs(each.factor) for each in means)
    if most and least >= most:
        names = f"The sum is that of {_words(sums[0].node)}, the mean that of {_words(means[0].node)}"
        detail = f"{names}, with factors of {least:.3g} and {most:.3g}: their ratio changes with the size of the batch."
        yield sums[0].node, MIXED_REDUCTION.found(detail=detail)


def _words(node: Any) -> str:
    return _name(node).removesuffix("0").lower()


# -- shapes ------------------------------------------------------------------------------------------------------------

_ERRORS = ("Pow", "Abs", "MseLoss", "SmoothL1Loss", "HuberLoss")


def outer_difference(terms: list[Term], samples: int | None) -> Iterator[Finding]:
    """Find an error whose difference of a column of outputs and a row of labels is a matrix, of which only the mean is used."""
    if samples is None or samples < 2 or len(terms) != 1 or _name(terms[0].node) not in _ERRORS:
        return
    difference, index = terms[0].node.next_functions[0]
    if difference is None or _name(difference) not in ("Sub", "Rsub") or terms[0].low != terms[0].high:
        return
    tracked = [each for each in difference.next_functions if each[0] is not None]
    given = shape_behind(*tracked[0]) if len(tracked) == 1 else None
    if shape_behind(difference, index) == (samples, samples) and given in ((samples, 1), (1, samples), (samples,)):
        shapes = f"Outputs of shape {given} and labels give differences of shape {(samples, samples)}"
        yield LABEL_SHAPE.found(detail=f"{shapes}: the loss compares each output with each label.")


def outer_losses(calls: list[LossCall]) -> Iterator[Finding]:
    """Find a loss among several that has repeated a column of outputs for a row of labels, or the other way round."""
    for call in calls:
        given, labels = (call.arguments.get(name) for name in ("input", "target"))
        if not isinstance(given, Tensor) or not isinstance(labels, Tensor) or not labels.is_floating_point():
            continue
        if (
            given.ndim != labels.ndim
            and given.numel() == labels.numel() < torch.broadcast_shapes(given.shape, labels.shape).numel()
        ):
            shapes = f"The output has the shape {tuple(given.shape)} and the labels {tuple(labels.shape)}"
            yield LABEL_SHAPE.found(detail=f"{shapes}: the loss compares each output with each label.")
