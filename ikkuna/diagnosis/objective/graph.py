"""The graph of autograd of an objective: its nodes, the parameters that it reaches, and what its terms are multiplied by."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ikkuna.support.torch_internals import nodes_behind, saved_by, shape_behind

_MOST_NODES = 20_000  # a walk of some milliseconds, in few steps
_MOST_PATHS = 400


def operation(node: Any) -> str:
    """Return the name of the operation that a node of autograd stands for.

    Examples
    --------
    >>> import torch
    >>> operation(torch.ones(2, requires_grad=True).exp().grad_fn)
    'Exp'
    """
    return str(node.name()).partition("Backward")[0]


class ObjectiveGraph:
    """The graph of autograd behind what ``backward()`` is called on, which is to be read before the backward frees it.

    Parameters
    ----------
    roots : sequence of Tensor
        What ``backward()`` is called on.

    Attributes
    ----------
    roots : tuple
        Their nodes.
    nodes : list
        All nodes, those nearest to the roots first.
    parameters : dict of int to object
        For each leaf that accumulates a gradient its id, and the node that accumulates it.
    is_complete : bool
        Whether the graph has no more nodes than are read.

    Examples
    --------
    >>> from torch import nn
    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> graph = ObjectiveGraph([model(torch.ones(3, 2)).square().mean()])
    >>> [operation(node) for node in graph.nodes[:3]], graph.reaches(map(id, model.parameters()))
    (['Mean', 'Pow', 'Addmm'], True)
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        first = (x.grad_fn if isinstance(x, Tensor) else getattr(x, "node", None) for x in roots)
        self.roots = tuple(node for node in first if node is not None)
        self.nodes: list[Any] = []
        self.parameters: dict[int, Any] = {}
        waiting, seen = deque(self.roots), set(self.roots)
        while waiting and len(seen) < _MOST_NODES:
            node = waiting.popleft()
            self.nodes.append(node)
            if (variable := getattr(node, "variable", None)) is not None:
                self.parameters[id(variable)] = node
            for behind, _ in node.next_functions:
                if behind is not None and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        self.is_complete = not waiting

    def reaches(self, parameters: Any) -> bool:
        """Return whether one of the parameters with these ids accumulates a gradient."""
        return any(each in self.parameters for each in parameters)


def nearest_parameters(node: Any) -> Iterator[int]:
    """Yield the ids of the leaves among the 200 nodes behind a node, the nearest first."""
    for each in nodes_behind([node], 200):
        if (variable := getattr(each, "variable", None)) is not None:
            yield id(variable)


class Term(NamedTuple):
    """A function of outputs and parameters that an objective adds up, with the numbers that it is multiplied by.

    Parameters
    ----------
    node : object
        The last operation of the term that is no sum, mean, product with constants, or choice of elements.
    low, high : float
        The least and largest gradient of the objective with respect to the elements of the term, without those that it leaves out.
    reduction : {'mean', 'sum', ''}
        How the axis of samples was removed between the term and the objective; empty if it was not, or if this is not known.
    factor : float
        What the mean or the sum over the samples is multiplied by.
    """

    node: Any
    low: float
    high: float
    reduction: str
    factor: float


class _Path(NamedTuple):
    """A node on the way from an objective to a term; its fields are those of `Term`, and whether a factor was below 1."""

    node: Any
    low: float = 1.0
    high: float = 1.0
    reduction: str = ""
    factor: float = math.nan
    is_divided: bool = False

    def behind(self, node: Any, low: float = 1.0, high: float = 1.0) -> _Path:
        """Return the path to a node whose result is multiplied by numbers of a range."""
        products = [a * b for a in (self.low, self.high) for b in (low, high)]
        return self._replace(node=node, low=min(products), high=max(products))


_SAME = (
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias", "ToCopy", "Clone", "Permute", "Transpose", "T"),
    *("Select", "Slice", "Index", "Gather", "IndexSelect", "Split", "SplitWithSizes", "Unbind", "MaskedSelect", "Stack", "Cat"),
    *("Where", "MaskedFill", "Narrow", "Unsafe_split", "Take"),
)  # fmt: skip
"""Operations that choose or rearrange elements."""

_LOSSES_REDUCED = (
    *("NllLoss", "NllLoss2D", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy"),
    *("BinaryCrossEntropyWithLogits", "SoftMarginLoss"),
)


def terms(graph: ObjectiveGraph, samples: int | None = None) -> list[Term] | None:
    """Return the terms of an objective of one number; ``None`` if there are too many.

    Parameters
    ----------
    graph : ObjectiveGraph
        The graph.
    samples : int, optional
        The number of samples of the batch.

    Examples
    --------
    >>> import torch
    >>> from torch.nn import functional
    >>> x = torch.ones(4, 2, requires_grad=True).exp()
    >>> found = terms(ObjectiveGraph([functional.mse_loss(x, torch.zeros(4, 2)) - 2 * x.abs().sum()]), 4)
    >>> [(operation(each.node), each.high, each.reduction, each.factor) for each in found]
    [('Abs', -2.0, 'sum', -2.0), ('MseLoss', 1.0, 'mean', 1.0)]
    """
    if len(graph.roots) != 1 or math.prod(shape_behind(graph.roots[0]) or ()) != 1:
        return None
    return _terms_behind(graph.roots[0], samples)


def arguments_of(node: Any) -> list[Any] | None:
    """Return the terms of the arguments of a node, each as its last operation; ``None`` if there are too many."""
    found: list[Any] = []
    for behind, _ in node.next_functions:
        several = [] if behind is None else _terms_behind(behind, None)
        if several is None:
            return None
        found += [each.node for each in several]
    return found


def _terms_behind(node: Any, samples: int | None) -> list[Term] | None:
    waiting, found = [_Path(node)], list[Term]()
    for _ in range(_MOST_PATHS):
        if not waiting:
            return found
        path = waiting.pop()
        step = _STEPS.get(operation(path.node))
        if step is None or (behind := step(path)) is None:
            found.append(Term(*_loss_reduced(path, samples)[:-1]))
        else:
            waiting += [_reduced(path, each, samples) for each in behind]
    return None


def _reduced(path: _Path, behind: _Path, samples: int | None) -> _Path:
    """Return a path with the mean or sum that has removed the axis of samples; a second one makes it unknown."""
    name, given, left = operation(path.node), shape_behind(behind.node), shape_behind(path.node)
    if name not in ("Mean", "Sum") or samples is None or not given or left is None:
        return behind
    if given[0] != samples or (left and left[0] == samples):
        return behind
    is_unknown = behind.reduction or path.low != path.high
    if is_unknown or (name == "Sum" and path.is_divided):  # it may have been divided by the number of samples
        return behind._replace(reduction="", factor=math.nan)
    return behind._replace(reduction=name.lower(), factor=path.low * math.prod(left))


def _loss_reduced(path: _Path, samples: int | None) -> _Path:
    """Return the path to a loss of torch, with its reduction."""
    if operation(path.node) not in _LOSSES_REDUCED or path.reduction or samples is None or path.low != path.high:
        return path
    given, reduction = saved_by(path.node, "self"), saved_by(path.node, "reduction")
    if not isinstance(given, Tensor) or not given.ndim or given.shape[0] % samples or reduction not in (1, 2):
        return path
    if reduction == 2 and path.is_divided:
        return path
    return path._replace(reduction="mean" if reduction == 1 else "sum", factor=path.low)


# -- steps that multiply by constants ----------------------------------------------------------------------------------


def _same(path: _Path) -> list[_Path] | None:
    return [path.behind(node) for node, _ in path.node.next_functions if node is not None]


def _times(path: _Path, node: Any, index: int, low: float, high: float) -> _Path:
    """Return the path to an argument, the gradient of which is summed over the axes along which it was repeated."""
    result, argument = shape_behind(path.node), shape_behind(node, index)
    elements = 0 if argument is None else math.prod(argument)
    repeated = 1.0 if result is None or not elements else math.prod(result) / elements
    return path.behind(node, low * repeated, high * repeated)


def _sum(path: _Path) -> list[_Path] | None:
    """Step through a sum, a difference, or a repetition, which is a sum of one argument."""
    name, found = operation(path.node), []
    alpha = saved_by(path.node, "alpha")
    second = float(1 if alpha is None else alpha)
    factors = (-second, 1.0) if name == "Rsub" else (1.0, -second if name == "Sub" else second)
    for (node, index), factor in zip(path.node.next_functions, factors, strict=False):
        if node is not None:
            found.append(_times(path, node, index, factor, factor))
    return found


def _negative(path: _Path) -> list[_Path] | None:
    return [path.behind(node, -1.0, -1.0) for node, _ in path.node.next_functions if node is not None]


def _product(path: _Path) -> list[_Path] | None:
    """Step through a product or a quotient with a constant."""
    following = list(path.node.next_functions)
    tracked = [place for place, (node, _) in enumerate(following) if node is not None]
    is_quotient = operation(path.node) == "Div"
    if len(tracked) != 1 or (is_quotient and tracked != [0]):
        return None
    ends = _ends(saved_by(path.node, "other" if tracked[0] == 0 else "self"))
    if ends is None or (is_quotient and ends[0] <= 0 <= ends[1]):
        return None
    low, high = sorted((1 / ends[0], 1 / ends[1])) if is_quotient else ends
    node, index = following[tracked[0]]
    step = _times(path, node, index, low, high)
    return [step._replace(is_divided=path.is_divided or max(abs(low), abs(high)) < 1)]


def _ends(value: Any) -> tuple[float, float] | None:
    """Return the least and the largest element of a constant factor, without zeros among others, which leave elements out."""
    if isinstance(value, int | float):
        return float(value), float(value)
    if not isinstance(value, Tensor) or not value.is_cpu or not value.numel() or value.is_complex():
        return None
    kept = value[value != 0] if value.numel() > 1 else value
    if not kept.numel():
        return 0.0, 0.0
    low, high = (float(x) for x in kept.double().aminmax())
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _mean(path: _Path) -> list[_Path] | None:
    node, index = path.node.next_functions[0]
    given, left = shape_behind(node, index), shape_behind(path.node)
    if not given or left is None:
        return None
    factor = math.prod(left) / max(math.prod(given), 1)
    return [path.behind(node, factor, factor)]


_STEPS: dict[str, Callable[[_Path], list[_Path] | None]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("Add", "Sub", "Rsub", "Expand"), _sum),
    **dict.fromkeys(("Mul", "Div"), _product),
    "Sum": _same,
    "Mean": _mean,
    "Neg": _negative,
}
