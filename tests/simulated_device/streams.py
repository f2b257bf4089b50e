"""Streams, events and copies of the simulated device."""

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.simulated_device.log import write
from tests.simulated_device.storage import memory_of

__all__ = [
    "LATENCY",
    "Event",
    "Stream",
    "copy_later",
    "current_stream",
    "note_written",
    "require_finished",
    "stream",
    "wait",
]

LATENCY = 2
"""How often an event must be asked until it is over; ``math.inf`` if it is over only after a wait."""

_copies: deque[tuple[Tensor, Tensor]] = deque()  # copies that are under way: target and data
_started = 0  # number of copies so far


class Stream:
    """A queue of kernels, like `torch.cuda.Stream`.

    Parameters
    ----------
    device : Any
        Ignored.
    priority : int
        Ignored.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.finished: dict[Stream, int] = {}  # up to which kernel of each other stream this one has waited
        self.kernels = 0

    def wait_event(self, event: "Event") -> None:
        """Make the kernels that follow wait for an event."""
        for stream, kernel in event.after.items():
            self.finished[stream] = max(kernel, self.finished.get(stream, 0))

    def wait_stream(self, stream: "Stream") -> None:
        """Make the kernels that follow wait for everything that another stream has to do now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return an event that is over when everything that the stream has to do now is done."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the stream."""
        wait("synchronize")

    def query(self) -> bool:
        """Return whether the stream has nothing to do."""
        write("query", "stream")
        return not _copies


_default = Stream()
_every: list[Stream] = [_default]
_thread = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return the stream to which this thread adds kernels."""
    return getattr(_thread, "stream", _default)


@contextmanager
def stream(other: Stream) -> Iterator[None]:
    """Add kernels to another stream."""
    before, _thread.stream = current_stream(), other
    if other not in _every:
        _every.append(other)
    try:
        yield
    finally:
        _thread.stream = before


class Event:
    """Like `torch.cuda.Event`; an event that was never recorded is over."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._copies = self._asked = 0
        self.after: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        """Remember what the stream has to do now."""
        stream = current_stream() if stream is None else stream
        self.after = {**stream.finished, stream: stream.kernels}
        self._copies, self._asked = _started, 0

    def query(self) -> bool:
        """Return whether the event is over."""
        write("query", "event")
        self._asked += 1
        if self._asked > LATENCY:
            _arrive(self._copies)
        return _started - len(_copies) >= self._copies

    def synchronize(self) -> None:
        """Wait for the event."""
        if _started - len(_copies) < self._copies:
            wait("event", self._copies)

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (current_stream() if stream is None else stream).wait_event(self)


def note_written(x: Tensor) -> None:
    """Remember that the next kernel of the current stream has written the storage of `x`."""
    x.untyped_storage().written_by = (stream := current_stream()), stream.kernels


def require_finished(x: Tensor) -> None:
    """Raise an error if a kernel of the current stream may run before the data of `x` are there."""
    stream = current_stream()
    writer, kernel = getattr(x.untyped_storage(), "written_by", (stream, 0))
    if writer is not stream and stream.finished.get(writer, 0) < kernel:
        raise RuntimeError("a kernel reads what another stream has written, and its stream has not waited for that one")


def copy_later(source: Tensor, target: Tensor) -> None:
    """Copy from the device to pinned memory when someone waits; until then `target` is NaN."""
    global _started
    data = memory_of(source).to(target.dtype, copy=True)
    target.view(-1).view(torch.uint8).fill_(0xFF)
    _copies.append((target, data))
    _started += 1


def _arrive(until: float) -> None:
    while _copies and _started - len(_copies) < until:
        target, data = _copies.popleft()
        target.copy_(data)


def wait(why: str, until: float = math.inf) -> None:
    """Let the host wait for the first `until` copies, or for everything."""
    write("sync", why)
    _arrive(until)
    if until == math.inf:
        for stream in _every:
            stream.finished |= {other: other.kernels for other in _every}
