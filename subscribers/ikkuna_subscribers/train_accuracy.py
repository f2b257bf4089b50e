"""The share of right answers in what is being trained on."""

import math
from typing import Any

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MessageBundle
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.accuracy import count_correct

__all__ = ["TrainAccuracySubscriber"]


class TrainAccuracySubscriber(PlotSubscriber):
    r"""The share of labels whose class is among the `k` largest outputs, :math:`\sum \text{correct} / \sum \text{valid}`.

    Takes what the loss module receives (see ``Exporter.set_loss``): outputs (N, C, …) and class labels (N, …),
    or class probabilities (N, C, …).
    Publishes ``train_accuracy`` (``train_accuracy_top{k}`` for k > 1), between 0 and 1;
    over micro-batches it is the share of all labels together.
    Labels equal to `ignore_index` do not count; a row with a NaN or +Inf among its outputs is wrong.
    With no valid label, or shapes that do not fit each other, it is NaN.

    Look for: the distance to the test accuracy, which is what the network knows by heart.

    Parameters
    ----------
    k : int
        How many of the largest outputs may hold the right one.
    ignore_index : int
        The label that stands for none.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `k` is not a whole number at least 1.

    Examples
    --------
    >>> TrainAccuracySubscriber().publishes, TrainAccuracySubscriber(k=5).publishes
    (('train_accuracy',), ('train_accuracy_top5',))
    """

    def __init__(self, *, k: int = 1, ignore_index: int = -100, **options: Any) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"TrainAccuracySubscriber needs k >= 1, got {k!r}")
        options.setdefault("publishes", "train_accuracy" if k == 1 else f"train_accuracy_top{k}")
        super().__init__(["network_output", "input_labels"], join=True, **options)
        self.k = k
        self.ignore_index = ignore_index

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return the numbers of right and of valid labels."""
        outputs, labels = bundle["network_output"].data, bundle["input_labels"].data
        return count_correct(outputs, labels, self.k, self.ignore_index)[:2]

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the share."""
        correct, valid = bundle.data
        self.emit(bundle, correct / valid if valid else math.nan)
