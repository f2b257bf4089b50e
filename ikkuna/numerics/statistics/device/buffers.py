"""Memory for what the kernels of a device write: rows, counts of float codes, and marks of imprecise rows."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.statistics.float_code import half_size
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values
from ikkuna.support.torch_internals import cuda_stream_handle


class UsedStreams:
    """Remembers streams, so that what follows can wait for them on the device.

    Parameters
    ----------
    device : torch.device
        The device; one without streams, such as ``mps``, has nothing to remember.

    Examples
    --------
    >>> streams = UsedStreams(torch.device("cpu"))
    >>> streams.note() is None
    True
    >>> streams.take() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._current: Any = getattr(module, "current_stream", None)
        self._handle = cuda_stream_handle if device.type == "cuda" and device.index is not None else None
        self._index = device.index
        self._streams: list[Any] = []
        self._known: dict[int, Any] = {}

    def note(self) -> Any:
        """Remember the stream of this thread, and return it; ``None`` if the device has none."""
        if self._current is None:
            return None
        if self._handle is None:
            stream = self._current(self._index)
        elif (stream := self._known.get(handle := self._handle(self._index))) is None:
            stream = self._known[handle] = self._current(self._index)
        if stream not in self._streams:
            self._streams.append(stream)
        return stream

    def merge(self, other: "UsedStreams") -> None:
        """Add the streams of `other`, and leave it as it is."""
        self._streams += (stream for stream in other._streams if stream not in self._streams)

    def wait(self) -> None:
        """Let the kernels that follow on the stream of this thread wait for the others, without waiting on the host."""
        for stream in self._streams:
            if stream != (current := self._current()):
                current.wait_stream(stream)

    def take(self) -> None:
        """Wait as `wait` does, and forget the streams."""
        self.wait()
        self._streams = []


_FIRST_CAPACITY = 64
_ROWS_AT_ONCE = 64


class KernelRows(NamedTuple):
    """Rows that a kernel writes.

    Parameters
    ----------
    owners : tuple of int
        The row of the step to which those of each tensor belong.
    counts : tuple of int
        How many rows each tensor has: there are hundreds of a large one.
    values : Tensor
        ``(sum of the counts, columns)``, float64, on the device.
    """

    owners: tuple[int, ...]
    counts: tuple[int, ...]
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
    >>> buffers.together([KernelRows((0,), (2,), first), KernelRows((1,), (3,), second)]).shape
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
    def together(written: Sequence[KernelRows]) -> Tensor:
        """Return all rows in one tensor, which is a part of the buffer if they follow one another there."""
        first = written[0].values
        count = sum(len(rows.values) for rows in written)
        at = first.storage_offset()
        for *_, values in written:
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


CODES = 2 * half_size(3)
"""Number of bins."""

_FIRST_BUFFERS = 32
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
        self._capacity = _FIRST_BUFFERS
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

    def take(self) -> list[CountBuffer]:
        """Return the tensors that contain histograms, and forget them."""
        buffers = [buffer for buffer in self._buffers if any(buffer.owners)]
        self._capacity = max(self._capacity, len(self))  # a step is like the one before
        self._buffers, self._known = [], {}
        return buffers


_SMALLEST, _LARGEST = 1e-16, 1e18  # of a root mean square; beyond, squares leave the range of float32
_OFFSET = 100  # of a squared mean to the variance; beyond, a variance in float32 loses digits
_N, _NANS, _INFS, _SUMSQ, _MEAN, _M2 = (COLUMN[name] for name in ("n", "nans", "infs", "sumsq", "mean", "m2"))


class ImpreciseRows:
    """Remembers which rows were measured with sums in float32 although these are not precise enough for them.

    They are measured precisely from the next step on, see `ExactRows`, until float32 is enough again.
    A norm of 0 is the norm of zeros or of numbers whose squares are too small for float32; it is marked once.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.table import row_of
    >>> imprecise = ImpreciseRows()
    >>> imprecise.note(0, row_of(0.0), frozenset(("sumsq",)), is_exact=False)
    >>> 0 in imprecise
    True
    >>> imprecise.note(0, row_of(1e-25), frozenset(("sumsq",)), is_exact=True)
    >>> 0 in imprecise
    True
    >>> imprecise.note(0, row_of(1.0), frozenset(("sumsq",)), is_exact=True)
    >>> 0 in imprecise
    False
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._zeros: set[int] = set()

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def note(self, row: int, values: Values, fields: frozenset[str], is_exact: bool) -> None:
        """Decide whether float32 is enough for a row with these values.

        Parameters
        ----------
        row : int
            Number of the row.
        values : array
            ``(columns,)``
        fields : frozenset of str
            The statistics that were measured.
        is_exact : bool
            Whether they were measured precisely.
        """
        if is_exact and row not in self._rows:
            return
        is_zero = "sumsq" in fields and not values[_SUMSQ] and not values[_NANS] + values[_INFS]
        if is_zero:
            if is_exact:
                self._zeros.add(row)
            if row in self._zeros:
                self._rows.discard(row)
                return
        else:
            self._zeros.discard(row)
        (self._rows.discard if _is_enough(values, fields) else self._rows.add)(row)


def _is_enough(values: Values, fields: frozenset[str]) -> bool:
    """Return whether float32 is enough for data with such statistics."""
    n, mean = values[_N], values[_MEAN]
    if values[_NANS] + values[_INFS]:
        return False
    variance = values[_M2] / n
    if "sumsq" in fields:
        rms = math.sqrt(values[_SUMSQ] / n)
    elif "m2" in fields:
        rms = math.sqrt(variance + mean * mean)
    else:
        return True
    return _SMALLEST < rms < _LARGEST and ("m2" not in fields or mean * mean <= _OFFSET * variance)
