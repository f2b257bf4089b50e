"""Accuracy as counts, which can be summed over batches and ranks of different sizes."""

import math

import torch
from torch import Tensor

__all__ = ["count_correct", "find_class_axis", "perplexity", "shifted", "wilson_interval"]


def count_correct(
    logits: Tensor, labels: Tensor, k: int = 1, ignore_index: int = -100, class_axis: int | None = None
) -> Tensor:
    r"""Count the labels that are among the `k` largest logits.

    A label is correct if fewer than `k` classes come before it in descending order of logits; classes with equal logits
    keep their order.

    Parameters
    ----------
    logits : Tensor
        ``(batch, class)``, ``(batch, class, d...)`` as for ``torch.nn.CrossEntropyLoss``, ``(batch, time, class)``, or
        ``(class,)``.
    labels : Tensor
        Class indices, of the shape of `logits` without the class axis; or probabilities of the shape of `logits`, whose
        largest is the label.
    k : int
        At least 1. If it exceeds the number of classes, every valid label is correct.
    ignore_index : int
        The label of items that are left out.
    class_axis : int, optional
        By default derived from the shapes; if both layouts fit, that of ``CrossEntropyLoss``.

    Returns
    -------
    Tensor
        ``(3,)``, int64: correct labels, valid labels, and valid labels whose logits contain a NaN or :math:`+\infty`;
        these are wrong. (:math:`-\infty` is a masked class.)  Results can be summed over data; accuracy is the first
        element over the second.
        Labels outside of the classes are valid and wrong.  All are zero for shapes that do not fit, without a label,
        and for meta and complex tensors.

    Notes
    -----
    One pass over `logits` for ``k = 1``; otherwise four, and two boolean copies of it.  No pass waits for the device.

    Examples
    --------
    >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    >>> count_correct(logits, torch.tensor([1, 1, -100])).tolist()
    [1, 2, 0]
    """
    logits, labels = logits.detach().to_dense(), labels.detach()
    logits = logits if logits.dtype.itemsize > 1 else logits.float()
    axis = find_class_axis(logits, labels) if class_axis is None else class_axis
    if axis is None or logits.is_meta or logits.is_complex() or not logits.numel() or k < 1:
        return torch.zeros(3, dtype=torch.int64, device="cpu" if logits.is_meta else logits.device)
    logits = logits.movedim(axis, -1)
    if labels.is_floating_point():
        labels = labels.movedim(axis, -1).argmax(-1)
    labels = labels.to(logits.device, torch.int64)
    largest, first = logits.max(-1)  # the first of equal ones; NaN in a row with a NaN
    broken = ~(largest < math.inf)
    valid = labels != ignore_index
    is_near = first == labels if k == 1 else _are_among(logits, labels, k)
    return torch.stack([torch.count_nonzero(mask) for mask in (valid & is_near & ~broken, valid, valid & broken)])


def _are_among(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Return whether each label is among the `k` largest logits of its row; of equal ones the first count."""
    classes = logits.shape[-1]
    index = labels.clamp(0, classes - 1).unsqueeze(-1)
    own = logits.gather(-1, index)
    earlier = torch.arange(classes, device=logits.device) < index
    place = ((logits > own) | ((logits == own) & earlier)).sum(-1)
    return (labels >= 0) & (labels < classes) & (place < k)


def shifted(logits: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Return views in which position t of the logits meets position ``t + shift`` of the labels.

    Parameters
    ----------
    logits : Tensor
        ``(batch, time, class)``.
    labels : Tensor
        ``(batch, time)``.
    shift : int
        At least 0.  Tensors of other shapes are returned unchanged.

    Examples
    --------
    >>> logits, labels = shifted(torch.zeros(1, 4, 9), torch.tensor([[5, 6, 7, 8]]), 1)
    >>> tuple(logits.shape), labels
    ((1, 3, 9), tensor([[6, 7, 8]]))
    """
    if not shift or labels.ndim < 2 or logits.ndim != labels.ndim + 1 or logits.shape[1] != labels.shape[1]:
        return logits, labels
    return logits[:, : max(labels.shape[1] - shift, 0)], labels[:, shift:]


def find_class_axis(logits: Tensor, labels: Tensor) -> int | None:
    """Return the axis of classes for which the shapes fit, or ``None``."""
    if not logits.ndim:
        return None
    if labels.is_floating_point():
        return (1 if logits.ndim > 1 else 0) if labels.shape == logits.shape else None
    if logits.ndim > 1 and labels.shape == logits.shape[:1] + logits.shape[2:]:
        return 1
    return logits.ndim - 1 if labels.shape == logits.shape[:-1] else None


def wilson_interval(correct: float, valid: float, z: float = 1.96) -> tuple[float, float]:
    r"""Return the Wilson score interval of an accuracy, which contains its true value with 95 % probability for `z` = 1.96.

    .. math::
        \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4 n^2}}{1 + z^2 / n}, \qquad p = correct / n

    Returns
    -------
    tuple of two floats
        In [0, 1]; NaN for ``valid = 0``.

    Examples
    --------
    >>> [round(bound, 4) for bound in wilson_interval(90, 100)]
    [0.8256, 0.9448]
    """
    if not valid > 0:
        return math.nan, math.nan
    p, spread = correct / valid, z * z / valid
    half = math.sqrt(spread * p * (1 - p) + spread * spread / 4)
    low, high = ((p + spread / 2 + sign * half) / (1 + spread) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def perplexity(mean_loss: float) -> float:
    """Return the exponential of a mean cross-entropy in nats, at least 1; infinite if it overflows, NaN for NaN.

    Examples
    --------
    >>> round(perplexity(math.log(50.0)), 6)      # a uniform guess among 50 tokens
    50.0
    """
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf
