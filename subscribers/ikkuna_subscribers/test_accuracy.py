"""The accuracy on test data."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import Pending, PlotSubscriber
from ikkuna.numerics.accuracy import count_correct
from ikkuna.undisturbed import undisturbed_randomness
from ikkuna_subscribers._helpers.arguments import require_integers
from ikkuna_subscribers._helpers.evaluation_schedule import scheduled_kind

__all__ = ["TestAccuracySubscriber"]


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
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(dataset, str | dict):
        raise ConfigTypeError(
            "TestAccuracySubscriber needs a map-style data set, with __len__ and __getitem__, "
            f"got {type(dataset).__name__}"
        )
    if not len(dataset):
        raise ConfigError("TestAccuracySubscriber needs a data set with at least one item, got an empty one")
    with undisturbed_randomness():  # an item may be augmented at random
        item = dataset[0]
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise ConfigError(
            f"TestAccuracySubscriber needs a data set of pairs (input, label), the first item is {what}; "
            "wrap it in a data set that returns labels"
        )
