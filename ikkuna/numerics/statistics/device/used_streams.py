"""The streams of a device on which measurements of a step were computed."""

from typing import Any

import torch

__all__ = ["UsedStreams"]


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
        self._streams: list[Any] = []

    def note(self) -> Any:
        """Remember the stream of this thread, and return it; ``None`` if the device has none."""
        if self._current is None:
            return None
        stream = self._current()
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
