"""Outputs, labels and options of a loss, as the nodes of autograd have saved them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ikkuna.support.torch_internals import nodes_behind, saved_by

_MOST_NODES = 256  # a loss is composed of fewer; behind them is the model
_SAME_ORDER = ("LogSoftmax", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "ToCopy", "Clone")


class LossArguments(NamedTuple):
    """Arguments of a functional loss.

    Parameters
    ----------
    outputs : Tensor
        Those of the network; their logarithms of probabilities if a cross-entropy is all that still knows them.
    labels : Tensor
        Class indices, probabilities of classes, or numbers.
    ignored : int, optional
        The label of items that are left out.
    """

    outputs: Tensor
    labels: Tensor
    ignored: int | None


def loss_arguments(losses: Iterable[Any], outputs: Iterable[Tensor] = ()) -> list[LossArguments]:
    """Return what losses were computed from, which the nodes of autograd of the losses of torch have saved.

    Parameters
    ----------
    losses : iterable of Tensor
        What ``backward()`` is called on, or what a loss function returns; functions of torch's losses, such as weighted sums.
    outputs : iterable of Tensor
        What the network has returned.

    Returns
    -------
    list of LossArguments
        One for each cross-entropy; if there is none, one for each other loss that has saved its labels.

    Examples
    --------
    >>> import torch
    >>> logits = torch.zeros(2, 3, requires_grad=True).exp()
    >>> loss = 0.5 * nn.functional.cross_entropy(logits, torch.tensor([2, 0]), ignore_index=0, label_smoothing=0.1)
    >>> [found] = loss_arguments([loss], [logits])
    >>> found.labels, found.ignored, torch.equal(found.outputs, logits)
    (tensor([2, 0]), 0, True)
    """
    known = {x.grad_fn: x.detach() for x in outputs if x.grad_fn is not None}
    of_classes: list[LossArguments] = []
    of_numbers: list[LossArguments] = []
    for node in _nodes(losses):
        if (labels := saved_by(node, "target")) is not None and (found := saved_by(node, "self")) is not None:
            ignored = saved_by(node, "ignore_index")
            found, labels = _compared(found, labels)
            is_of_classes = ignored is not None or not labels.is_floating_point()
            arguments = LossArguments(_logits(node, found, known), labels, ignored)
            (of_classes if is_of_classes else of_numbers).append(arguments)
        elif node.name().startswith("MulBackward") and (soft := _of_probabilities(node, known)) is not None:
            of_classes.append(soft)
    hard = [found for found in of_classes if not found.labels.is_floating_point()]
    return hard or of_classes or of_numbers


def _nodes(losses: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, those nearest to the losses first, but none behind one that has saved labels."""
    first = (x.grad_fn for x in losses if isinstance(x, Tensor))
    return nodes_behind(first, _MOST_NODES, lambda node: hasattr(type(node), "_saved_target"))


def _of_probabilities(node: Any, known: dict[Any, Tensor]) -> LossArguments | None:
    """Return what a cross-entropy with probabilities as labels was computed from, which multiplies them by the logarithms."""
    behind = node.next_functions[0][0]
    if behind is None or not behind.name().startswith("LogSoftmaxBackward"):
        return None
    result, labels = saved_by(behind, "result"), saved_by(node, "other")
    if result is None or labels is None or labels.shape != result.shape:
        return None
    return LossArguments(_logits(node, result, known), labels, None)


def _logits(node: Any, found: Tensor, known: dict[Any, Tensor]) -> Tensor:
    """Return the output of the network from which a loss has taken `found`, in its shape; if there is none, `found`."""
    while (behind := node.next_functions[0][0] if node.next_functions else None) is not None:
        output = known.get(behind)
        if output is not None:
            return output.reshape(found.shape) if output.numel() == found.numel() else found
        if behind.name().split("Backward")[0] not in _SAME_ORDER:
            break
        node = behind
    return found


class SavedLoss(NamedTuple):
    """A loss of torch, and what it was called with.

    Parameters
    ----------
    loss : nn.Module
        Computes the same loss.
    outputs, labels : Tensor
        Its arguments, without a graph; of a cross-entropy, the outputs of the network or else the logarithms of their probabilities.
    behind : Any
        The node of autograd that has made the outputs.
    """

    loss: nn.Module
    outputs: Tensor
    labels: Tensor
    behind: Any


_REDUCTIONS = "none", "mean", "sum"


def _of_elements(make: Callable[..., nn.Module], *options: str) -> Callable[[Any], nn.Module]:
    """Return a function that makes the module of a loss from the options that a node has saved."""

    def of_node(node: Any) -> nn.Module:
        named = {name: saved_by(node, name) for name in options}
        return make(reduction=_REDUCTIONS[saved_by(node, "reduction")], **named)

    return of_node


_LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    **dict.fromkeys(("NllLoss", "NllLoss2D"), _of_elements(nn.NLLLoss, "weight", "ignore_index")),
    "BinaryCrossEntropy": _of_elements(nn.BCELoss, "weight"),
    "BinaryCrossEntropyWithLogits": _of_elements(nn.BCEWithLogitsLoss, "weight", "pos_weight"),
    "MseLoss": _of_elements(nn.MSELoss),
    "SmoothL1Loss": _of_elements(nn.SmoothL1Loss, "beta"),
    "HuberLoss": _of_elements(nn.HuberLoss, "delta"),
    "SoftMarginLoss": _of_elements(nn.SoftMarginLoss),
}


def saved_loss(roots: Sequence[Any], outputs: Iterable[Tensor] = ()) -> SavedLoss | None:
    """Return the loss of torch that ``backward()`` is called on, divided or multiplied by numbers; ``None`` for any other.

    Parameters
    ----------
    roots : sequence of Tensor
        What ``backward()`` is called on.
    outputs : iterable of Tensor
        What the network has returned.

    Examples
    --------
    >>> import torch
    >>> logits = torch.zeros(2, 3, requires_grad=True).exp()
    >>> found = saved_loss([nn.functional.cross_entropy(logits, torch.tensor([2, 0])) / 4], [logits])
    >>> found.loss, found.labels, found.behind.name()
    (CrossEntropyLoss(), tensor([2, 0]), 'ExpBackward0')
    """
    node: Any = roots[0].grad_fn if len(roots) == 1 and isinstance(roots[0], Tensor) else None
    while node is not None and _name(node) in ("Div", "Mul"):
        factors = [each for each, _ in node.next_functions if each is not None]
        node = factors[0] if len(factors) == 1 else None
    return None if node is None or _name(node) not in _LOSSES else loss_of_node(node, outputs)


def loss_of_node(node: Any, outputs: Iterable[Tensor] = ()) -> SavedLoss | None:
    """Return the loss of torch that a node of autograd stands for, or is the last one of; ``None`` for any other node.

    Examples
    --------
    >>> import torch
    >>> scores = torch.zeros(2, 3, requires_grad=True).exp()
    >>> divergence = nn.functional.kl_div(scores.softmax(1), torch.full((2, 3), 1 / 3), reduction="none")
    >>> found = loss_of_node(divergence.grad_fn)
    >>> found.loss, found.behind.name()
    (KLDivLoss(), 'SoftmaxBackward0')
    """
    if (make := _LOSSES.get(_name(node))) is None:
        return _divergence(node)
    found, labels = saved_by(node, "self"), saved_by(node, "target")
    if found is None or labels is None:
        return None
    known = {x.grad_fn: x.detach() for x in outputs if x.grad_fn is not None}
    behind, loss = node.next_functions[0][0], make(node)
    if isinstance(loss, nn.NLLLoss):
        while behind is not None and behind not in known and _name(behind) in _SAME_ORDER[1:]:
            behind = behind.next_functions[0][0]
        is_of_network = behind in known or behind is None
        if not is_of_network and _name(behind) == "LogSoftmax" and saved_by(behind, "dim") == min(found.ndim - 1, 1):
            behind = behind.next_functions[0][0]
            logits, result = _logits(node, found, known), saved_by(behind, "result")
            is_saved = logits is found and result is not None and result.numel() == found.numel()
            found = result.reshape(found.shape) if is_saved else logits
            loss = nn.CrossEntropyLoss(loss.weight, ignore_index=loss.ignore_index, reduction=loss.reduction)
    else:
        found, labels = _compared(found, labels)
    return SavedLoss(loss, found, labels, behind)


def _divergence(node: Any) -> SavedLoss | None:
    """Return the divergence whose elements a node computes, as ``target.xlogy(target) - target * input`` of a constant target.

    With ``log_target`` it is ``target.exp() * (target - input)``.  The input is known if it is the result of a softmax, whose node has it.
    """
    name, following = _name(node), [behind for behind, _ in node.next_functions]
    if len(following) != 2 or following[0] is not None or following[1] is None:
        return None
    inner, is_logarithm = following[1], name == "Mul"
    if (name, _name(inner)) not in (("Sub", "Mul"), ("Mul", "Sub")) or len(inner.next_functions) != 2:
        return None
    target, (constant, behind) = saved_by(node if is_logarithm else inner, "self"), (b for b, _ in inner.next_functions)
    if target is None or constant is not None or behind is None:
        return None
    given, axis = saved_by(behind, "result"), saved_by(behind, "dim")
    if _name(behind) not in ("LogSoftmax", "Softmax") or given is None or given.shape != target.shape:
        return None
    if not target.is_cpu or bool((target < 0).any()) or bool(((target.sum(axis) - 1).abs() > 1e-3).any()):
        return None  # other products and differences; the sums of a divergence's targets are 1
    loss = nn.KLDivLoss(reduction="none", log_target=is_logarithm)
    return SavedLoss(loss, given, target.log() if is_logarithm else target, behind)


def _name(node: Any) -> str:
    return str(node.name().split("Backward")[0])


def _is_repeated(axis: tuple[int, int]) -> bool:
    size, stride = axis
    return size > 1 and stride == 0


def _compared(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and labels as a loss was called with them, if it has repeated the outputs: one for each label and sample."""
    if any(map(_is_repeated, zip(outputs.shape, outputs.stride(), strict=True))):
        return _unexpanded(outputs), _unexpanded(labels)
    return outputs, labels


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor before it was repeated along axes.

    Examples
    --------
    >>> import torch
    >>> _unexpanded(torch.ones(3, 1).expand(3, 3)).shape, _unexpanded(torch.ones(3).expand(3, 3)).shape
    (torch.Size([3, 1]), torch.Size([3]))
    """
    repeated = list(map(_is_repeated, zip(tensor.shape, tensor.stride(), strict=True)))
    while repeated and repeated[0]:
        tensor, repeated = tensor[0], repeated[1:]
    for axis, is_repeated in enumerate(repeated):
        tensor = tensor.narrow(axis, 0, 1) if is_repeated else tensor
    return tensor
