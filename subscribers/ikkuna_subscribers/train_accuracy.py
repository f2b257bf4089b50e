"""The share of right answers in what is being trained on."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import MessageBundle
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["TrainAccuracySubscriber"]


class TrainAccuracySubscriber(PlotSubscriber):
    r"""The share of labels whose class has the largest output, :math:`\sum \text{correct} / \sum \text{valid}`.

    Takes what the loss module receives (see ``Exporter.set_loss``): outputs (N, C, …) and class labels (N, …).
    Publishes ``train_accuracy``, between 0 and 1; over micro-batches it is the share of all labels together.
    Labels equal to `ignore_index` do not count; a row with a NaN or Inf among its outputs is wrong.  With no valid label it is NaN.

    Parameters
    ----------
    ignore_index : int
        The label that stands for none.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> TrainAccuracySubscriber().publishes
    ('train_accuracy',)
    """

    def __init__(self, *, ignore_index: int = -100, **options: Any) -> None:
        options.setdefault("publishes", "train_accuracy")
        super().__init__(["network_output", "input_labels"], join=True, **options)
        self.ignore_index = ignore_index

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return the numbers of right and of valid labels."""
        outputs, labels = bundle["network_output"].data, bundle["input_labels"].data
        dim = 1 if outputs.ndim > 1 else 0
        if labels.is_floating_point():  # class probabilities
            labels = labels.argmax(dim)
        valid = labels != self.ignore_index
        finite = torch.isfinite(outputs).all(dim)
        correct = valid & finite & (outputs.argmax(dim) == labels)
        return torch.stack([correct.sum(), valid.sum()])

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the share."""
        correct, valid = bundle.data
        self.emit(bundle, correct / valid if valid else math.nan)
