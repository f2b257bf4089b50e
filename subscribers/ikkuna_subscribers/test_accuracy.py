"""The share of right answers on data that is not trained on."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.accuracy import count_correct
from ikkuna.undisturbed import undisturbed_randomness

__all__ = ["TestAccuracySubscriber"]


class TestAccuracySubscriber(PlotSubscriber):
    r"""The share of labels of a data set whose class is among the `k` largest outputs, :math:`\sum \text{correct} / \sum \text{valid}`.

    Every epoch, or every so many steps, training pauses and the model is run over the data in evaluation mode, without gradient;
    afterwards every flag, buffer and random state is as it was.  Takes ``epoch_finished`` or ``batch_finished``;
    publishes ``test_accuracy`` (``test_accuracy_top{k}`` for k > 1), between 0 and 1, with the stamp of the step after which it was taken.
    What subscribers with ``tag="testing"`` see is this pass.
    Labels equal to `ignore_index` do not count; a row with a NaN or +Inf among its outputs is wrong; with no valid label it is NaN.
    How many such rows there are is published as ``test_nonfinite_rows``, with the same ending, unless `publishes` is one name alone.
    All labels count the same, also those of a last batch that is smaller.

    Look for: where it stops to rise while the training accuracy goes on.

    Parameters
    ----------
    dataset : map-style data set of pairs (input, label)
        Its length and its items are asked for; batches are made as ``torch.utils.data.DataLoader`` does, in order.
    batch_size : int
        Number of items per batch.
    every : int, optional
        Number of optimizer steps from one test to the next, the first step included; by default once an epoch.
    k : int
        How many of the largest outputs may hold the right one.
    ignore_index : int
        The label that stands for none.
    forward : callable, optional
        Computes outputs from the model and a batch's inputs; by default the model is called with them.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `dataset` is no map-style data set.
    ConfigError
        If it is empty or has no labels, or a number is out of range.

    Examples
    --------
    >>> data = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    >>> TestAccuracySubscriber(data, batch_size=10, every=100).publishes
    ('test_accuracy', 'test_nonfinite_rows')
    """

    __test__ = False  # pytest takes a class of this name for tests

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
        for name, number in (("batch_size", batch_size), ("every", 1 if every is None else every), ("k", k)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"TestAccuracySubscriber needs {name} >= 1, got {number!r}")
        if every is not None and "subsample" in options:
            raise ConfigError("TestAccuracySubscriber takes every=, in steps, or subsample=, in epochs, got both")
        ending = "" if k == 1 else f"_top{k}"
        options.setdefault("publishes", (f"test_accuracy{ending}", f"test_nonfinite_rows{ending}"))
        if every is not None:
            options["subsample"] = every
        super().__init__("epoch_finished" if every is None else "batch_finished", **options)
        self.k = k
        self.ignore_index = ignore_index
        self.forward = forward
        # A generator of its own: a loader without one draws its workers' seed from the global one.
        self.loader = DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(0))

    def compute(self, message: NetworkMessage) -> None:
        """Run the model over the data and emit the share, and how many rows are not finite."""
        if message.skipped or self.evaluate is None:
            return
        counts: list[Tensor] = []

        def count(outputs: Tensor, labels: Tensor) -> None:
            counts.append(count_correct(outputs, labels, self.k, self.ignore_index))

        self.evaluate(self.loader, visit=count, forward=self.forward)
        correct, valid, broken = torch.stack(counts).sum(0).tolist()
        self.emit(message, correct / valid if valid else math.nan, self.publishes[0])
        if len(self.publishes) > 1:
            self.emit(message, broken, self.publishes[1])


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
            "wrap it in one that returns labels"
        )
