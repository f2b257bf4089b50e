"""How the losses of micro-batches make one loss."""

from typing import Literal

import torch
from torch import Tensor, nn

from ikkuna.numerics.float64 import widest_float

__all__ = ["label_weight", "loss_weight"]

_BY_SEQUENCE = ("CTCLoss",)


def loss_weight(
    module: nn.Module, loss: Tensor, outputs: Tensor | None, labels: Tensor | None
) -> int | Tensor | Literal["sum"] | None:
    """Return the weight of one call's loss in the mean over several calls.

    A mean loss has the weight by which torch has divided the sum: the number of labels that are not ignored, or the sum of their classes'
    weights.  The losses of ``reduction="sum"`` are added up.

    Parameters
    ----------
    module : nn.Module
        The module that computes the loss.
    loss : Tensor
        Its output.
    outputs, labels : Tensor, optional
        The first two tensors it was called with.

    Returns
    -------
    int, Tensor, "sum" or None
        On an accelerator the weight stays there.  ``None`` for a loss that is not one number.

    Examples
    --------
    >>> labels = torch.tensor([0, 1, 1, -100])
    >>> mean, total = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    >>> loss_weight(mean, torch.tensor(0.5), None, labels), loss_weight(total, torch.tensor(0.5), None, labels)
    (3, 'sum')
    >>> loss_weight(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), torch.tensor(0.5), None, labels)
    tensor(7., dtype=torch.float64)
    """
    if loss.numel() != 1:
        return None
    if getattr(module, "reduction", None) == "sum":
        return "sum"
    if type(module).__name__ in _BY_SEQUENCE and outputs is not None:
        return outputs.shape[1] if outputs.ndim == 3 else 1  # (time, batch, class)
    if labels is None:
        return 1
    if labels.is_floating_point() or getattr(module, "ignore_index", None) is None:
        return labels.numel()
    return label_weight(labels, int(module.ignore_index), getattr(module, "weight", None))  # type: ignore[arg-type]


def label_weight(labels: Tensor, ignored: int, weights: Tensor | None = None) -> int | Tensor:
    """Return the number of labels that are not ignored, or the sum of their classes' weights.

    Examples
    --------
    >>> label_weight(torch.tensor([0, 1, 1, -100]), -100)
    3
    """
    counts = labels != ignored
    if weights is None:
        count = torch.count_nonzero(counts)
        return int(count) if count.device.type == "cpu" else count
    of_labels = weights.detach().to(widest_float(weights))[torch.where(counts, labels, 0)]
    return torch.where(counts, of_labels, 0.0).sum()
