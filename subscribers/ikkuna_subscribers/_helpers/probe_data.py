"""A fixed choice of inputs that stays the same during a whole training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["ProbeData"]


class ProbeData:
    """The batches of a fixed choice of the items of a data set, in a fixed order.

    Items are read from the data set once and then kept, so that random augmentation cannot change them.
    The choice is random, without replacement, and uses a generator of its own.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    dataset : torch.utils.data.Dataset or Tensor
        A map-style data set; the items are inputs, or pairs (input, label).
    samples : int, optional
        The number of items; by default all.
    batch_size : int
        The number of items per batch.
    seed : int
        The seed of the choice.

    Raises
    ------
    ConfigTypeError
        If `dataset` is not a map-style data set.
    ConfigError
        If `dataset` is empty or has fewer than `samples` items, or a number is out of range.

    Examples
    --------
    >>> data = ProbeData("Some", torch.arange(10), samples=5, batch_size=3)
    >>> len(data), [len(batch) for batch in data], sorted(torch.cat(list(data)).tolist()) == sorted(set(torch.cat(list(data)).tolist()))
    (5, [3, 2], True)
    """

    def __init__(
        self, owner: str, dataset: Any, samples: int | None = None, batch_size: int = 256, seed: int = 0
    ) -> None:
        sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if (
            not sized
            or isinstance(dataset, str | dict | DataLoader)
            or (isinstance(dataset, Tensor) and not dataset.ndim)
        ):
            raise ConfigTypeError(
                f"{owner} needs a map-style data set, with __len__ and __getitem__, or a tensor, "
                f"got {type(dataset).__name__}"
            )
        require_integers(owner, batch_size=batch_size, samples=1 if samples is None else samples)
        if not len(dataset):
            raise ConfigError(f"{owner} needs a probe set with at least one item, got an empty one")
        if samples is not None and samples > len(dataset):
            raise ConfigError(f"{owner} got samples={samples}, but the probe set has {len(dataset)} items")
        self._dataset = dataset
        self._size = len(dataset) if samples is None else samples
        self._batch_size = batch_size
        self._seed = seed
        self._batches: list[Any] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._batches = list(self._loader())
            self._dataset = None  # not needed any more
        return iter(self._batches)

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self._seed)
        order = list(range(self._size))
        if self._size < len(self._dataset):
            order = torch.randperm(len(self._dataset), generator=generator, device="cpu")[: self._size].tolist()
        return DataLoader(Subset(self._dataset, order), self._batch_size, generator=generator)
