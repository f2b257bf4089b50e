"""The accuracy on the training data."""

import math
from typing import Any

from torch import Tensor

from ikkuna.export.messages import MessageBundle
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.accuracy import count_correct, shifted
from ikkuna.numerics.noise import RunningMean
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["TrainAccuracySubscriber"]


class TrainAccuracySubscriber(PlotSubscriber):
    r"""The share of labels whose class is among the `k` largest outputs, :math:`\sum \text{correct} / \sum \text{valid}`.

    Takes the arguments of the loss module (see ``Exporter.set_loss``): outputs (N, C, …) and class labels (N, …),
    or class probabilities (N, C, …).
    Publishes ``train_accuracy`` (``train_accuracy_top{k}`` for k > 1), between 0 and 1;
    over micro-batches it is the share of all labels together.
    With `beta` it is ``running_accuracy``, over the labels of about the last ``1 / (1 - beta)`` sampled steps:
    correct and valid labels are averaged separately, so that a small batch has a small weight.
    Labels equal to `ignore_index` are left out; a row with a NaN or +Inf among its outputs is wrong.
    The number of such rows is published as ``nonfinite_rows`` with the same ending, unless `publishes` is a single name.
    Without a valid label, or if the shapes do not fit each other, accuracy is NaN.

    Look for: the difference to the test accuracy, which shows overfitting.

    Parameters
    ----------
    k : int
        The number of largest outputs that may contain the correct class.
    ignore_index : int
        The label of items that are left out.
    shift : int
        Number of positions by which labels (N, T) are ahead of the outputs (N, T, C) that predict them: 1 for a causal language model
        whose loss function shifts them itself.  The labels of transformers' causal language models are shifted already.
    beta : float, optional
        The coefficient of a running accuracy, in [0, 1); by default each step has its own accuracy.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `k` is not a positive integer, `shift` is not an integer from 0 on, or `beta` is out of range.

    Examples
    --------
    >>> TrainAccuracySubscriber().publishes, TrainAccuracySubscriber(k=5, beta=0.99).publishes
    (('train_accuracy', 'nonfinite_rows'), ('running_accuracy_top5', 'nonfinite_rows_running_top5'))
    """

    state = ("_correct", "_valid")

    def __init__(
        self, *, k: int = 1, ignore_index: int = -100, shift: int = 0, beta: float | None = None, **options: Any
    ) -> None:
        require_integers("TrainAccuracySubscriber", k=k)
        require_integers("TrainAccuracySubscriber", least=0, shift=shift)
        ending = "" if k == 1 else f"_top{k}"
        if beta is None:
            options.setdefault("publishes", (f"train_accuracy{ending}", f"nonfinite_rows{ending}"))
        else:
            options.setdefault("publishes", (f"running_accuracy{ending}", f"nonfinite_rows_running{ending}"))
        super().__init__(["network_output", "input_labels"], join=True, **options)
        self.k = k
        self.ignore_index = ignore_index
        self.shift = shift
        self._correct, self._valid = RunningMean(beta or 0.0), RunningMean(beta or 0.0)

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return the numbers of correct labels, of valid labels, and of valid labels whose outputs are not finite."""
        outputs, labels = shifted(bundle["network_output"].data, bundle["input_labels"].data, self.shift)
        return count_correct(outputs, labels, self.k, self.ignore_index)

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the share and the number of rows that are not finite."""
        correct, valid, broken = bundle.data
        self._correct.update(correct)
        self._valid.update(valid)
        share = self._correct.value / self._valid.value if self._valid.value else math.nan
        self.emit(bundle, share, self.publishes[0])
        if len(self.publishes) > 1:
            self.emit(bundle, broken, self.publishes[1])
