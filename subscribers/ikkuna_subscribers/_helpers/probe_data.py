"""A few inputs that stay the same for a whole training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from ikkuna.errors import ConfigError, ConfigTypeError

__all__ = ["ProbeData"]


class ProbeData:
    """The batches of a fixed choice of a data set's items, in a fixed order.

    Items are taken from the data set once and kept, so that random augmentation cannot change them.
    The choice is random, without replacement, and from a generator of its own.

    Parameters
    ----------
    owner : the class to name in errors
    dataset : map-style data set, or a tensor; items are inputs, or pairs (input, label)
    samples : how many items; all if ``None``
    batch_size : number of items per batch
    seed : of the choice

    Raises
    ------
    ConfigTypeError
        If `dataset` is no map-style data set.
    ConfigError
        If it is empty or has fewer items than are asked for, or a number is out of range.

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
        for name, number in (("batch_size", batch_size), ("samples", 1 if samples is None else samples)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{owner} needs {name} >= 1, got {number!r}")
        if not len(dataset):
            raise ConfigError(f"{owner} needs a probe set with at least one item, got an empty one")
        if samples is not None and samples > len(dataset):
            raise ConfigError(f"{owner} was asked for samples={samples}, but the probe set has {len(dataset)} items")
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
            self._dataset = None  # from now on it is not needed
        return iter(self._batches)

    def _loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(self._seed)
        order = list(range(self._size))
        if self._size < len(self._dataset):
            order = torch.randperm(len(self._dataset), generator=generator)[: self._size].tolist()
        return DataLoader(Subset(self._dataset, order), self._batch_size, generator=generator)
