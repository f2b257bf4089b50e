"""Finds wrong shifts of labels, padding that counts, and attention that sees too much, in objectives of sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.diagnosis.mistakes import LABEL_OFFSET, LABELS_OF_OTHER_SAMPLES, PADDING_IN_LOSS, TIME_LEAK, VIEWED_AXES
from ikkuna.diagnosis.objective.graph import operation
from ikkuna.diagnosis.preflight_checks.sequences import is_at
from ikkuna.store.finding import Finding
from ikkuna.support.torch_internals import saved_by, shape_behind

_OFFSETS = range(-3, 4)
_ROUNDING = 1e-6  # of a weight
_FEWEST = 4  # positions, below which chance makes labels equal to inputs
_MOST_ELEMENTS = 4_000_000
_MOST_OPERATIONS = 24
_MUCH = 0.2
_ARRANGING = (
    *("LogSoftmax", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "ToCopy", "Unsqueeze", "Squeeze"),
    *("Transpose", "Permute", "Div", "Mul", "Add"),
)
_OF_IMAGES = ("Convolution", "UpsampleNearest2D", "UpsampleBilinear2D")
_VIEWS = ("View", "UnsafeView", "ReshapeAlias")


class Attention(NamedTuple):
    """The weights of an attention.

    Parameters
    ----------
    node : object
        The node of autograd that has saved them.
    weights : Tensor of shape (row, head, query, key)
        The weights, or numbers above 0 where there is a weight.
    """

    node: Any
    weights: Tensor


def attentions(nodes: Sequence[Any], rows: int, length: int) -> list[Attention]:
    """Return the attentions over sequences of a length, which are softmaxes over square matrices, or torch's own function.

    Examples
    --------
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> x = torch.randn(2, 4, 3, requires_grad=True)
    >>> scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
    >>> [found] = attentions(ObjectiveGraph([(scores.softmax(-1) @ x).sum()]).nodes, 2, 4)
    >>> found.weights.shape, bool(found.weights.triu(1).any())
    (torch.Size([2, 1, 4, 4]), False)
    """
    found = []
    for node in nodes:
        name = operation(node)
        if name in ("Softmax", "SafeSoftmax"):
            weights = saved_by(node, "result")
            axis = saved_by(node, "dim")
            if not isinstance(weights, Tensor) or axis not in (-1, weights.ndim - 1):
                continue
        elif name.startswith("ScaledDotProduct"):
            weights = _allowed(node)
        else:
            continue
        arranged = _arranged(weights, rows, length)
        if arranged is not None:
            found.append(Attention(node, arranged))
    return found


def _arranged(weights: Any, rows: int, length: int) -> Tensor | None:
    if not isinstance(weights, Tensor) or not weights.is_cpu or weights.numel() > _MOST_ELEMENTS or weights.ndim < 2:
        return None
    if weights.shape[-2:] != (length, length) or not weights.numel():
        return None
    leading = weights.shape[:-2].numel()
    if leading % rows:
        return None if leading != 1 else weights.reshape(1, 1, length, length)
    return weights.reshape(rows, -1, length, length)


def _allowed(node: Any) -> Tensor | None:
    """Return 1 where the function of torch lets a query see a key, and 0 elsewhere."""
    query, key, mask = (saved_by(node, name) for name in ("query", "key", "attn_mask"))
    if query is None or key is None or not query.is_cpu or query.ndim != 4:
        return None
    shape = (*query.shape[:2], query.shape[2], key.shape[2])
    allowed = torch.ones(shape[2:], device="cpu")
    if saved_by(node, "is_causal"):
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed * (mask if mask.dtype is torch.bool else mask > -1e4).to(allowed)
    return allowed.expand(shape)


def sees_later(attention: Attention) -> bool:
    """Return whether a query has a weight for a later key."""
    return bool((attention.weights.triu(1) > _ROUNDING).any())


def is_causal(attention: Attention) -> bool:
    """Return whether no query has a weight for a later key, and some have one for an earlier one."""
    return not sees_later(attention) and bool((attention.weights.tril(-1) > _ROUNDING).any())


class LabelledTokens(NamedTuple):
    """Sequences of tokens, and the labels with which the loss compares the outputs at the same positions.

    Parameters
    ----------
    tokens : Tensor of shape (row, time)
        The inputs.
    labels : Tensor of shape (row, time)
        The labels; -1 where an output is compared with none, or with one that is ignored.
    """

    tokens: Tensor
    labels: Tensor


def sequences_of(node: Any, tokens: Tensor) -> LabelledTokens | None:
    """Return tokens and the labels of a cross-entropy at their positions; ``None`` if the loss is not one of each position.

    Parameters
    ----------
    node : object
        The node of autograd of a cross-entropy.
    tokens : Tensor of shape (row, time)
        The integers with which the model was called.

    Examples
    --------
    >>> head, tokens = torch.nn.Linear(3, 7), torch.tensor([[5, 3, 4, 1], [3, 4, 6, 2]])
    >>> scores = head(torch.randn(2, 4, 3))[:, :-1].flatten(0, 1)
    >>> loss = torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
    >>> sequences_of(loss.grad_fn, tokens).labels
    tensor([[ 3,  4,  1, -1],
            [ 4,  6,  2, -1]])
    """
    labels, ignored = saved_by(node, "target"), saved_by(node, "ignore_index")
    rows, length = tokens.shape
    if not isinstance(labels, Tensor) or not labels.is_cpu or labels.is_floating_point() or labels.numel() % rows:
        return None
    count = labels.numel() // rows
    start = _first_position(node, rows, length, count)
    if start is None:
        return None
    known = labels.reshape(rows, count)
    placed = torch.full((rows, length), -1, dtype=torch.long, device="cpu")
    placed[:, start : start + count] = torch.where((known == ignored) | (known < 0), -1, known.long())
    return LabelledTokens(tokens, placed)


def _first_position(node: Any, rows: int, length: int, count: int) -> int | None:
    """Return the position of the first output that a loss uses, behind which a layer computes an output of each position."""
    start = 0
    for _ in range(_MOST_OPERATIONS):
        node = node.next_functions[0][0] if node.next_functions else None
        name = "" if node is None else operation(node)
        if name in ("Addmm", "Mm", "Bmm"):
            shape = shape_behind(node) or (0,)
            each = math.prod(shape[:-1])
            is_whole = count == length or start + count <= length
            return start if each == rows * length and is_whole else None
        if name == "Slice" and saved_by(node, "dim") in (1, -2) and saved_by(node, "step") in (1, None):
            start += max(int(saved_by(node, "start") or 0), 0)
        elif name not in _ARRANGING:
            return None
    return None


def exchanged_axes(node: Any) -> Iterator[Finding]:
    """Find scores whose axis of classes a view has exchanged with another one, in place of a transpose.

    Parameters
    ----------
    node : object
        The node of autograd of a cross-entropy.

    Examples
    --------
    >>> scores = torch.randn(2, 4, 7, requires_grad=True).exp()
    >>> loss = torch.nn.functional.cross_entropy(scores.view(2, 7, 4), torch.zeros(2, 4).long())
    >>> [found.rule for found in exchanged_axes(loss.grad_fn)]
    ['viewed_axes']
    """
    for _ in range(_MOST_OPERATIONS):
        node, index = node.next_functions[0] if node.next_functions else (None, 0)
        if node is None:
            return
        after = shape_behind(node, index)
        if operation(node) not in _ARRANGING:
            return
        behind, place = node.next_functions[0]
        before = shape_behind(behind, place) if behind is not None else None
        if operation(node) in _VIEWS and before is not None and after is not None and before != after:
            kept = [[size for size in shape if size > 1] for shape in (before, after)]
            is_exchanged = kept[0] != kept[1] and sorted(kept[0]) == sorted(kept[1])
            if is_exchanged or (operation(behind) in _OF_IMAGES and _cuts_channels(before, after)):
                yield VIEWED_AXES.found(detail=f"The shape {before} becomes {after}.")
                return


def _cuts_channels(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether a view of (sample, class, position, …) to (…, class) makes rows of positions of one class."""
    return len(after) == 2 and before[1] == after[1] > 1 < math.prod(before[2:])


def exchanged_heads(nodes: Sequence[Any]) -> Iterator[tuple[Any, Finding]]:
    """Find views from positions of an attention to its heads, or back, in place of a transpose.

    The query, the key or the result of an attention is (…, head, position, feature), and the view has (…, position, more features) on its
    other side: a head then has pieces of some positions.  The two are not told apart if there are as many heads as positions.

    Yields
    ------
    tuple of (object, Finding)
        The node of the view.

    Examples
    --------
    >>> from ikkuna.diagnosis.objective.graph import ObjectiveGraph
    >>> x = torch.randn(2, 6, 8, requires_grad=True) * 1
    >>> split = [x.view(2, 4, 6, 2), x.view(2, 6, 4, 2).transpose(1, 2)]
    >>> graphs = [ObjectiveGraph([(q @ q.mT).softmax(-1).sum()]) for q in split]
    >>> [len(list(exchanged_heads(graph.nodes))) for graph in graphs]
    [1, 0]
    """
    known = {shape for node in nodes for shape in _head_shapes(node) if shape[-2] != shape[-1] > 1}
    for node in nodes:
        behind, place = node.next_functions[0] if operation(node) in _VIEWS else (None, 0)
        before, after = (None, None) if behind is None else (shape_behind(behind, place), shape_behind(node))
        if before is None or after is None or min(len(before), len(after)) < 3 or before[-2] != after[-2]:
            continue
        of_head, of_all = sorted((before, after), key=lambda shape: shape[-1])
        if of_head[-1] < of_all[-1] and of_head[:-1] in known:
            yield (
                node,
                VIEWED_AXES.found(detail=f"The shape {before} becomes {after}, with the positions of attention."),
            )


def _head_shapes(node: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of queries and keys of an attention, without their features."""
    name = operation(node)
    if name in ("Softmax", "SafeSoftmax") and len(shape := shape_behind(node) or ()) > 2:
        yield from (shape[:-1], (*shape[:-2], shape[-1]))
    elif name.startswith("ScaledDotProduct"):
        given = (saved_by(node, name) for name in ("query", "key"))
        yield from (tuple(x.shape[:-1]) for x in given if x is not None and x.ndim > 2)


def offset(found: LabelledTokens) -> int | None:
    """Return how many positions later the label of a position stands in the inputs; ``None`` if this does not hold for all.

    Examples
    --------
    >>> tokens = torch.tensor([[5, 3, 4, 1, 2, 6], [3, 4, 6, 2, 5, 1]])
    >>> offset(LabelledTokens(tokens, torch.cat([tokens[:, 1:], torch.full((2, 1), -1)], 1)))
    1
    """
    if int((found.labels >= 0).any(0).sum()) < _FEWEST or len(found.tokens.unique()) < 3:
        return None
    known = [k for k in _OFFSETS if abs(k) < found.tokens.shape[1] - 1 and is_at(found.labels, found.tokens, k)]
    return known[0] if len(known) == 1 else None


def wrong_offset(shifts: set[int], seen: list[Attention], recurrent: list[nn.RNNBase]) -> Iterator[Finding]:
    """Find labels that are not the next inputs.

    Labels of two positions later or of earlier ones are no task for a model in which each position sees itself and earlier ones, and
    such a model copies labels that are the inputs themselves.  In another model they may be those of an autoencoder.

    Parameters
    ----------
    shifts : set of int
        The offset of the labels of each loss.
    seen : list of Attention
        The attentions over the inputs.
    recurrent : list of nn.RNNBase
        The recurrent networks of the model.
    """
    wrong = min(shifts, key=abs, default=1)
    if 1 not in shifts and wrong != 1 and _reads_forwards(seen, recurrent):
        yield LABEL_OFFSET.found(wrong)


def _reads_forwards(seen: list[Attention], recurrent: list[nn.RNNBase]) -> bool:
    is_recurrent = len(recurrent) == 1 and not recurrent[0].bidirectional and not seen
    return is_recurrent or (bool(seen) and all(map(is_causal, seen)))


def next_of_other_rows(found: LabelledTokens, seen: list[Attention], recurrent: list[nn.RNNBase]) -> Iterator[Finding]:
    """Find rows of labels that are the next inputs of rows, not always of their own, in a model that sees no later position.

    Parameters
    ----------
    found : LabelledTokens
        Tokens and labels.
    seen, recurrent : list
        See `wrong_offset`.

    Examples
    --------
    >>> tokens = torch.tensor([[5, 3, 4, 1, 2], [3, 4, 6, 2, 5], [1, 2, 6, 5, 3]])
    >>> labels = torch.cat([tokens[[1, 0, 2], 1:], torch.full((3, 1), -1)], 1)
    >>> [found.value for found in next_of_other_rows(LabelledTokens(tokens, labels), [], [nn.GRU(2, 2)])]
    [0.66...]
    """
    labels, following = found.labels[:, None, :-1], found.tokens[:, 1:]
    known = labels >= 0
    if following.numel() * len(following) > _MOST_ELEMENTS or int(known.sum(2).min()) < _FEWEST:
        return
    fits = ((labels == following) | ~known).all(2)
    moved = float((~fits.diagonal()).float().mean())
    if moved and bool(fits.any(1).all()) and _reads_forwards(seen, recurrent):
        detail = "The labels of each row are the next inputs of a row of the batch, but not of the same one."
        advice = "shuffle inputs and labels together, by one permutation"
        yield LABELS_OF_OTHER_SAMPLES.found(moved, detail=detail, advice=advice)


def seen_labels(
    shifts: set[int], seen: list[Attention], recurrent: dict[str, nn.RNNBase]
) -> Iterator[tuple[Any, Finding]]:
    """Find labels that are the next inputs, which an attention or a recurrent network in two directions has seen.

    Yields
    ------
    tuple of (object, Finding)
        The node of the attention, or the name of the recurrent network.
    """
    if 1 not in shifts or -1 in shifts:  # two models of one text, one of them backwards
        return
    leaking = next((each for each in reversed(seen) if sees_later(each)), None)
    backwards = next((name for name, module in recurrent.items() if module.bidirectional), None)
    if leaking is not None:
        weight = float(leaking.weights.triu(1).max())
        detail = (
            f"The labels are the next inputs, and the attention has weights of up to {weight:.2g} for later positions."
        )
        yield leaking.node, TIME_LEAK.found(weight, detail=detail)
    elif backwards is not None and not seen:
        yield (
            backwards,
            TIME_LEAK.found(detail="The labels are the next inputs, and the network reads them in both directions."),
        )


def padding_of(tokens: Tensor) -> Tensor | None:
    """Return where sequences end in padding: one value that stands nowhere but at their ends, in numbers that differ.

    Examples
    --------
    >>> padding_of(torch.tensor([[4, 2, 0, 0], [3, 0, 0, 0], [1, 2, 5, 3]])).int()
    tensor([[0, 0, 1, 1],
            [0, 1, 1, 1],
            [0, 0, 0, 0]], dtype=torch.int32)
    >>> padding_of(torch.tensor([[4, 2, 0, 2], [3, 0, 1, 0]])) is None
    True
    """
    if tokens.ndim != 2 or tokens.shape[1] < _FEWEST or len(tokens) < 2:
        return None
    last, counts = tokens[:, -1].unique(return_counts=True)
    is_value = tokens == last[counts.argmax()]
    is_end = is_value.flip(1).long().cumprod(1).flip(1).bool()
    lengths = is_end.sum(1)
    is_padding = torch.equal(is_value, is_end) and len(lengths.unique()) > 1 and int((lengths > 1).sum()) > 1
    return is_end if is_padding else None


def padding_in_loss(found: LabelledTokens, counts: Tensor) -> Iterator[Finding]:
    """Find labels that are padding and have a gradient, beside the first of a row, which may stand for its end.

    Parameters
    ----------
    found : LabelledTokens
        Tokens and labels.
    counts : Tensor of shape (row, time)
        Where the outputs have a gradient.
    """
    is_padding = padding_of(found.tokens)
    if is_padding is None:
        return
    behind = is_padding & is_padding.roll(1, 1)
    behind[:, 0] = is_padding[:, 0]
    labels = found.labels[behind & counts]
    if not len(labels) or bool((labels != labels[0]).any()):
        return
    elsewhere = found.labels[~is_padding & counts]
    if not len(elsewhere) or float((elsewhere == labels[0]).float().mean()) > 0.5:
        return
    share = len(labels) / max(int(counts.sum()), 1)
    at_most = "warning" if share >= _MUCH else "info"
    yield PADDING_IN_LOSS.found(share, detail=f"Their label is {int(labels[0])}.", at_most=at_most)


def inverted_masks(seen: list[Attention], is_padding: Tensor | None) -> Iterator[Any]:
    """Yield the nodes of attentions with weights for the padding of each row that has some, and none for what is not padding."""
    if is_padding is None:
        return
    rows = is_padding.any(1) & ~is_padding.all(1)
    keys = is_padding[:, None, None, :].float()
    for each in seen:
        if len(each.weights) != len(is_padding) or not bool(rows.any()):
            continue
        weights = each.weights.float()
        on_padding, on_words = (weights * keys).sum((1, 2, 3)), (weights * (1 - keys)).sum((1, 2, 3))
        if bool((on_padding[rows] > 0).all()) and bool((on_words[rows] == 0).all()):
            yield each.node


def added_masks(seen: list[Attention], is_padding: Tensor | None) -> Iterator[Any]:
    """Yield the nodes of attentions of torch to whose scores a mask of padding, or of what is none, is added as 0 and 1."""
    if is_padding is None:
        return
    for each in seen:
        mask = saved_by(each.node, "attn_mask")
        if mask is None or not mask.is_cpu or not mask.is_floating_point() or mask.ndim < 3:
            continue
        if (len(mask), mask.shape[-1]) != is_padding.shape:
            continue
        keys = mask.flatten(1, -2)
        if any(torch.equal(keys, hidden[:, None].to(keys).expand_as(keys)) for hidden in (is_padding, ~is_padding)):
            yield each.node
