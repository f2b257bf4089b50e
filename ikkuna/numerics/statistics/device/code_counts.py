"""Histograms of float codes that kernels of a device add to."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.statistics.float_code import half_size

__all__ = ["CODES", "CodeCounts", "CountBuffer", "CountOwner"]

CODES = 2 * half_size(3)
"""Number of bins."""

_FIRST_CAPACITY = 32
_LIMIT = (1 << 31) - 1  # of a count


class CountOwner(NamedTuple):
    """Elements that a histogram counts.

    Parameters
    ----------
    row : int
        The row of the step.
    names : tuple of str
        The fields that its counts are added to.
    scale : float
        How many elements each counted one stands for; scaled counts are rounded.
    """

    row: int
    names: tuple[str, ...]
    scale: float = 1.0


class CountBuffer:
    """Histograms in one tensor.

    Parameters
    ----------
    counts : Tensor
        ``(capacity, codes)``, int32, zero.
    stream : Any
        The stream on which they are cleared and counted.

    Attributes
    ----------
    owners : list of CountOwner or None
        Those of the histograms in use; ``None`` for a histogram that was dropped.
    """

    def __init__(self, counts: Tensor, stream: Any) -> None:
        self.counts, self.stream = counts, stream
        self.owners: list[CountOwner | None] = []


class CodeCounts:
    """The histograms of a step on one device, in few tensors, each cleared with one launch.

    Parameters
    ----------
    device : torch.device
        The device.

    Examples
    --------
    >>> counts = CodeCounts(torch.device("cpu"))
    >>> counts.of(CountOwner(7, ("codes",)), n=100, histograms=2, stream=None).shape
    torch.Size([2, 4096])
    >>> len(counts), [buffer.owners[0].row for buffer in counts.take()], len(counts)
    (2, [7], 0)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[CountBuffer] = []
        self._capacity = _FIRST_CAPACITY
        self._known: dict[tuple[CountOwner, Any], tuple[Tensor, int]] = {}  # histograms, and the elements they count

    def __len__(self) -> int:
        return sum(len(buffer.owners) for buffer in self._buffers)

    def of(self, owner: CountOwner, n: int, histograms: int, stream: Any) -> Tensor:
        """Return the histograms ``(histograms or more, codes)`` of an owner, to which `n` elements will be added.

        They are those that it has on this stream, unless a count might not fit.
        """
        known, counted = self._known.get((owner, stream), (None, 0))
        if known is None or counted + n > _LIMIT or len(known) < histograms:
            known, counted = self.reserve([owner] * histograms, stream), 0
        self._known[owner, stream] = known, counted + n
        return known

    def reserve(self, owners: Sequence[CountOwner], stream: Any) -> Tensor:
        """Return new histograms ``(owners, codes)``, which are zero."""
        buffer = next((b for b in reversed(self._buffers) if b.stream == stream), None)
        if buffer is None or len(buffer.owners) + len(owners) > len(buffer.counts):
            capacity = max(self._capacity, len(owners), len(self))
            counts = torch.zeros(capacity, CODES, dtype=torch.int32, device=self._device)
            self._buffers.append(buffer := CountBuffer(counts, stream))
        first = len(buffer.owners)
        buffer.owners += owners
        return buffer.counts[first : first + len(owners)]

    def merge(self, other: "CodeCounts") -> None:
        """Add the histograms of `other`, and leave it as it is."""
        self._buffers += (buffer for buffer in other._buffers if buffer not in self._buffers)

    def drop(self, rows: Iterable[int]) -> None:
        """Forget the histograms of some rows."""
        dropped = set(rows)
        for buffer in self._buffers:
            buffer.owners = [None if o is None or o.row in dropped else o for o in buffer.owners]
        self._known = {key: known for key, known in self._known.items() if key[0].row not in dropped}

    def used(self) -> list[CountBuffer]:
        """Return the tensors that contain histograms."""
        return [buffer for buffer in self._buffers if any(buffer.owners)]

    def take(self) -> list[CountBuffer]:
        """Return the tensors that contain histograms, and forget them."""
        buffers, used = self.used(), len(self)
        self._capacity = max(self._capacity, used)  # a step is like the one before
        self._buffers, self._known = [], {}
        return buffers
