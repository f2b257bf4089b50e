"""The number of samples of a step."""

import math

import torch
from torch import Tensor

from ikkuna.export.messages import NetworkMessage

__all__ = ["SampleCount"]


class SampleCount:
    """Counts the samples of ``input_data``: the length of the first axis of the first tensor among the network's arguments.

    Examples
    --------
    >>> from ikkuna.export.messages import Stamp
    >>> count, stamp = SampleCount(), Stamp(0, 0, 0)
    >>> row = count.measure(NetworkMessage(stamp, "input_data", torch.ones(8, 3)))
    >>> count.add(NetworkMessage(stamp, "input_data", row.numpy()))
    >>> count.take(), count.take()
    ((8.0, 1.0), (nan, 0.0))
    """

    def __init__(self) -> None:
        self._found: tuple[float, float] | None = None

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the row of one call: the number of samples, and 1."""
        x: Tensor = message.data
        return torch.tensor([x.shape[0], 1], dtype=torch.float64, device="cpu") if x.ndim else None

    def add(self, message: NetworkMessage) -> None:
        """Store the merged row of the first tensor of a step; rows of further tensors are ignored."""
        if self._found is None:
            samples, calls = message.data
            self._found = float(samples), float(calls)

    def take(self) -> tuple[float, float]:
        """Return and clear the numbers of samples and of calls; without a call, NaN and 0."""
        found, self._found = self._found, None
        return found or (math.nan, 0.0)
