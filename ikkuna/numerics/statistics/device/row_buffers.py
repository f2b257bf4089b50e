"""Memory for the rows that kernels of a device write."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.statistics.table import COLUMNS

__all__ = ["RowBuffers", "Written"]

_FIRST_CAPACITY = 64
_ROWS_AT_ONCE = 64


class Written(NamedTuple):
    """Rows that a kernel writes.

    Parameters
    ----------
    owners : tuple of int
        The row of the step to which each of them belongs.
    values : Tensor
        ``(rows, columns)``, float64, on the device.
    """

    owners: tuple[int, ...]
    values: Tensor


class _Buffer:
    """Rows in one tensor."""

    def __init__(self, values: Tensor, stream: Any) -> None:
        self.values, self.stream, self.used = values, stream, 0
        self.capacity = len(values)
        self._rows: Sequence[Tensor] = ()  # views of single rows, made many at once, which takes a third of the time
        self._first_row = 0

    def take(self, count: int) -> Tensor:
        """Return the next rows."""
        first = self.used
        self.used += count
        if count > 1:
            return self.values[first : self.used]
        if first >= self._first_row + len(self._rows):
            self._first_row, self._rows = first, self.values[first : first + _ROWS_AT_ONCE].split(1)
        return self._rows[first - self._first_row]


class RowBuffers:
    """The rows of a step on one device, in few tensors, so that they need not be put together.

    Parameters
    ----------
    device : torch.device
        The device.

    Examples
    --------
    >>> buffers = RowBuffers(torch.device("cpu"))
    >>> first, second = buffers.reserve(2, None), buffers.reserve(3, None)
    >>> buffers.together([Written((0, 0), first), Written((1, 1, 1), second)]).shape
    torch.Size([5, 14])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity = _FIRST_CAPACITY
        self._buffers: list[_Buffer] = []

    def reserve(self, count: int, stream: Any) -> Tensor:
        """Return memory ``(count, columns)`` for rows that a kernel writes on this stream."""
        buffer = self._buffers[-1] if self._buffers else None
        if buffer is not None and buffer.stream != stream:
            buffer = next((b for b in reversed(self._buffers) if b.stream == stream), None)
        if buffer is None or buffer.used + count > buffer.capacity:
            capacity = max(self._capacity, count)
            values = torch.empty(capacity, len(COLUMNS), dtype=torch.float64, device=self._device)
            self._buffers.append(buffer := _Buffer(values, stream))
        return buffer.take(count)

    @staticmethod
    def together(written: Sequence[Written]) -> Tensor:
        """Return all rows in one tensor, which is a part of the buffer if they follow one another there."""
        first = written[0].values
        count = sum(len(rows.values) for rows in written)
        at = first.storage_offset()
        for _, values in written:
            if (
                values.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or values.storage_offset() != at
            ):
                return torch.cat([rows.values for rows in written])
            at += values.numel()
        return first.as_strided((count, first.shape[1]), first.stride(), first.storage_offset())

    def take(self) -> None:
        """Forget the buffers; their memory lives as long as their rows."""
        self._capacity = max(
            self._capacity, sum(buffer.used for buffer in self._buffers)
        )  # a step is like the one before
        self._buffers = []
