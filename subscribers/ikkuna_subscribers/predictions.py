"""The loss, and metrics of outputs and labels."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MessageBatch, MessageBundle, NetworkMessage
from ikkuna.export.subscriber import Pending, PlotSubscriber, Quantity, SharedStatisticSubscriber, name_results
from ikkuna.numerics.noise import RunningMean
from ikkuna.numerics.prediction import (
    PREDICTION_FIGURES,
    Comparisons,
    constant_figures,
    count_correct,
    prediction_figures,
    shifted,
)
from ikkuna.numerics.statistics.record import Records
from ikkuna.support.undisturbed import undisturbed_randomness
from ikkuna_subscribers._helpers import require_dataset, require_integers, scheduled_kind


class LossSubscriber(PlotSubscriber):
    """The loss: what the module given to ``set_loss`` returns, or else the scalar on which ``backward()`` is called.

    Takes ``loss`` and shows it; it publishes nothing, because the loss is a kind already.
    Over micro-batches it is their mean weighted by the number of labels; a loss per element is averaged.

    Look for: a plateau, a sudden rise, or a NaN.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> LossSubscriber(subsample=10).kinds
    ('loss',)
    """

    quantity = Quantity(larger="bad", is_headline=True)
    fields = ("mean",)

    def __init__(self, **options: Any) -> None:
        super().__init__("loss", **options)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Show the loss."""
        self.show_batch(batch, batch.records.mean)


class PerplexitySubscriber(SharedStatisticSubscriber):
    r"""The exponential of the mean loss, :math:`e^{L}`, for a cross-entropy L in nats.

    Takes ``loss``, as returned by the module given to ``set_loss``, or what ``backward()`` was called on;
    publishes ``perplexity``, a number of choices, at least 1.
    Over micro-batches it is computed from the mean loss weighted by the number of labels; it is not a mean of perplexities.
    It is infinite for a loss above 709, and NaN for a loss of NaN or Inf.

    Look for: at the start it equals the number of classes or tokens, when all are equally likely; each halving is one bit learned.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> PerplexitySubscriber().publishes
    ('perplexity',)
    """

    quantity = Quantity("choices", low=1.0, larger="bad", is_headline=True)
    fields = ("mean",)
    results = ("perplexity",)

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "perplexity")
        super().__init__("loss", **options)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the perplexities; what is summed from several losses has none."""
        kept = np.array(
            [i for i, name in enumerate(batch.names.names) if not (name or "").startswith("objective")], np.intp
        )
        super().compute_batch(batch if len(kept) == len(batch) else batch.select(kept, batch.names.select(kept)))

    def values(self, record: Records) -> tuple[Any, ...]:
        """Return the perplexity."""
        return (np.exp(record.mean),)


_NATS = Quantity("nats", low=0.0, larger="bad")
_FLAG = Quantity(low=0.0, high=1.0, scale="share")


class PredictionSubscriber(PlotSubscriber):
    r"""Figures of the outputs and labels of a classification: cross-entropy, entropies, scale, and dependence on the input.

    Takes the arguments of the loss module (see ``Exporter.set_loss``): outputs (N, C, …) and class labels (N, …).
    Publishes ``output_dependence``, ``output_cross_entropy``, ``output_classes``, ``output_is_probability``, ``output_magnitude``,
    ``output_log_normalizer``, ``prediction_entropy``, ``label_entropy``, ``label_mean``, ``label_variance``, ``label_count``,
    ``output_binary_cross_entropy``, ``output_in_unit_interval`` and ``output_uniform_cross_entropy``,
    see `ikkuna.numerics.prediction.prediction_figures`; entropies are in nats.
    Labels that are numbers between 0 and 1 have ``output_dependence``, ``output_magnitude``, ``output_binary_cross_entropy`` and
    ``output_in_unit_interval``, other losses only ``output_dependence``; an undefined figure is not published.
    Of several micro-batches and ranks the last one counts.  If the same outputs are compared with several labels in a step, as in mixup,
    each comparison is a part of what is minimised, and nothing is published.

    Look for: an ``output_dependence`` near 0, because the outputs are the same for every input;
    a ``prediction_entropy`` of 0 while that of the labels is not; a first ``output_cross_entropy`` or ``loss`` above
    ``output_uniform_cross_entropy``, the logarithm of the number of classes, which a network that guesses reaches.

    Parameters
    ----------
    ignore_index : int
        The label of items that are left out.
    shift : int
        See `TrainAccuracySubscriber`.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> PredictionSubscriber().publishes[:2]
    ('output_dependence', 'output_cross_entropy')
    """

    quantity = (
        Quantity(low=0.0, high=1.0, scale="share", zero="bad"),
        _NATS,
        Quantity("classes", low=0.0),
        _FLAG,
        Quantity(low=0.0, scale="log"),
        Quantity("nats", scale="signed"),
        *(Quantity("nats", low=0.0), Quantity("nats", low=0.0)),
        Quantity(scale="signed"),
        Quantity(low=0.0),
        Quantity("labels", low=0.0),
        *(_NATS, _FLAG, Quantity("nats", low=0.0)),
    )
    merge = "last"

    def __init__(self, *, ignore_index: int = -100, shift: int = 0, **options: Any) -> None:
        require_integers("PredictionSubscriber", least=0, shift=shift)
        name_results(options, *PREDICTION_FIGURES)
        super().__init__(["network_output", "input_labels"], join=True, **options)
        self.ignore_index = ignore_index
        self.shift = shift
        self._comparisons = Comparisons()

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return all figures."""
        if self._comparisons.is_another(bundle.stamp, bundle["network_output"].data, bundle["input_labels"].data):
            return self.unknown(bundle)
        outputs, labels = shifted(bundle["network_output"].data, bundle["input_labels"].data, self.shift)
        return prediction_figures(outputs, labels, self.ignore_index, bundle.stamp.global_step)

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the figures that are defined."""
        for kind, value in zip(self.publishes, bundle.data, strict=True):
            if not math.isnan(value):
                self.emit(bundle, value, kind)


class ConstantPredictionSubscriber(PlotSubscriber):
    r"""The loss over that of the best constant prediction, for losses of numbers and of probabilities.

    Takes the arguments of the loss and the loss: outputs and labels of one shape, numbers or probabilities.
    Publishes ``loss_over_constant``, without a unit; ``constant_loss``, the loss of the best constant as a mean over elements;
    and ``loss_form``, which loss it is, as a number of `ikkuna.numerics.prediction.LOSS_FORMS`; -1 is an unknown one.
    The loss is recognised by its value: MSE, MAE, Huber, binary cross-entropy, cross-entropy with probabilities, or divergence.
    Of a loss of another form, and of equal labels, only ``loss_form`` is published.
    Of several micro-batches and ranks the last one counts; nothing is published if the same outputs are compared with several labels.

    Look for: a ``loss_over_constant`` that stays near 1, because the network has learned only the mean of the labels; above 1 it is worse.
    Below 0 the loss has the wrong sign.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ConstantPredictionSubscriber().publishes
    ('loss_form', 'loss_over_constant', 'constant_loss')
    """

    quantity = (Quantity(low=-1.0), Quantity(larger="bad"), Quantity(low=0.0))
    merge = "last"

    def __init__(self, **options: Any) -> None:
        name_results(options, "loss_form", "loss_over_constant", "constant_loss")
        super().__init__(["network_output", "input_labels", "loss"], join=True, **options)
        self._comparisons = Comparisons()

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return the form of the loss, its share, and the loss of the best constant."""
        outputs, labels, loss = (bundle[kind].data for kind in self.kinds)
        if self._comparisons.is_another(bundle.stamp, outputs, labels):
            return self.unknown(bundle)
        return (
            None
            if not labels.is_floating_point()
            else constant_figures(outputs, labels, loss, bundle.stamp.global_step)
        )

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the figures that are defined."""
        for kind, value in zip(self.publishes, bundle.data, strict=True):
            if not math.isnan(value):
                self.emit(bundle, value, kind)


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
    Without a valid label, as for a regression, or if the shapes do not fit each other, nothing is published.

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

    quantity = (
        Quantity(low=0.0, high=1.0, scale="share", larger="good", is_headline=True),
        Quantity("rows", low=0.0, zero="good", larger="bad"),
    )
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
        if not (count := self._valid.value):
            return
        self.emit(bundle, self._correct.value / count, self.publishes[0])
        if len(self.publishes) > 1:
            self.emit(bundle, broken, self.publishes[1])


class TestAccuracySubscriber(PlotSubscriber):
    r"""The share of a data set whose class is among the `k` largest outputs, :math:`\sum \text{correct} / \sum \text{valid}`.

    Once an epoch, or every so many steps, training pauses and the model runs over the data in evaluation mode, without gradients;
    every flag, buffer and random state is restored afterwards.  Takes ``epoch_finished`` or ``batch_finished``;
    publishes ``test_accuracy`` (``test_accuracy_top{k}`` for k > 1), between 0 and 1, with the stamp of the step before the evaluation.
    Subscribers with ``tag="testing"`` receive the messages of this evaluation.
    Labels equal to `ignore_index` are left out; a row with a NaN or +Inf among its outputs is wrong; without a valid label it is NaN.
    The number of such rows is published as ``test_nonfinite_rows``, with the same ending, unless `publishes` is a single name.
    All labels have the same weight, also those of a smaller last batch.

    Look for: a test accuracy that stops rising while the training accuracy still rises.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        A map-style data set of pairs (input, label); batches are made by ``torch.utils.data.DataLoader``, in order.
    batch_size : int
        The number of items per batch.
    every : int, optional
        The number of optimizer steps from one evaluation to the next, the first step included; by default once an epoch.
    k : int
        The number of largest outputs that may contain the correct class.
    ignore_index : int
        The label of items that are left out.
    forward : callable, optional
        Computes outputs from the model and a batch's inputs; by default the model is called with the inputs.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `dataset` is not a map-style data set.
    ConfigError
        If `dataset` is empty or has no labels, or a number is out of range.

    Examples
    --------
    >>> data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    >>> TestAccuracySubscriber(data, batch_size=10, every=100).publishes
    ('test_accuracy', 'test_nonfinite_rows')
    """

    quantity = (
        Quantity(low=0.0, high=1.0, scale="share", larger="good", is_headline=True),
        Quantity("rows", low=0.0, zero="good", larger="bad"),
    )
    __test__ = False  # pytest would collect a class of this name

    needs_model = True

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 256,
        every: int | None = None,
        k: int = 1,
        ignore_index: int = -100,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        **options: Any,
    ) -> None:
        _check_dataset(dataset)
        require_integers("TestAccuracySubscriber", batch_size=batch_size, k=k)
        kind = scheduled_kind("TestAccuracySubscriber", every, options)
        ending = "" if k == 1 else f"_top{k}"
        options.setdefault("publishes", (f"test_accuracy{ending}", f"test_nonfinite_rows{ending}"))
        super().__init__(kind, **options)
        self.k = k
        self.ignore_index = ignore_index
        self.forward = forward
        # A loader without a generator draws the seed of its workers from the global one.
        self.loader = DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(0))

    def compute(self, message: NetworkMessage) -> None:
        """Run the model over the data; emit the share and the number of rows that are not finite."""
        if message.skipped or self.evaluate is None:
            return
        counts: list[Tensor] = []

        def count(outputs: Tensor, labels: Tensor) -> None:
            counts.append(count_correct(outputs, labels, self.k, self.ignore_index))

        self.evaluate(self.loader, visit=count, forward=self.forward)

        def emit(pending: Pending[list[float]]) -> None:
            correct, valid, broken = pending.result()
            self.emit(message, correct / valid if valid else math.nan, self.publishes[0])
            if len(self.publishes) > 1:
                self.emit(message, broken, self.publishes[1])

        self.later(message, {x.device for x in counts}, lambda: torch.stack(counts).sum(0).tolist(), emit)


def _check_dataset(dataset: Any) -> None:
    require_dataset("TestAccuracySubscriber", dataset)
    with undisturbed_randomness():  # an item may be augmented at random
        item = dataset[0]
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise ConfigError(
            f"TestAccuracySubscriber needs a data set of pairs (input, label), the first item is {what}; "
            "wrap it in a data set that returns labels"
        )
