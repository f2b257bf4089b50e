"""Asynchronous gathering of bytes from all ranks."""

from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from ikkuna.background import BackgroundThread

__all__ = ["Gather"]

_LENGTH = 8
_SMALLEST = 1 << 12
_REMEMBERED = 16


class Gather:
    """All-gathers payloads of bytes, one at a time, in blocks of one size.

    Gloo aborts the process if sizes differ within an operation, so every rank sends a block of the same size,
    ``[length of the payload, payload, padding]``.  All ranks receive all lengths.  If a payload did not fit,
    all ranks gather again with the next power of two that fits; if the largest of the last 16 payloads fits into
    a quarter of the block, all use a smaller one.  So a gather is one operation, except the first one and those that grow.

    Parameters
    ----------
    group : ProcessGroup
        A group that nothing else uses.
    size : int
        Number of ranks.

    Attributes
    ----------
    block : int
        Size of a block in bytes.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size
        self.block = _SMALLEST
        self._largest: deque[int] = deque(maxlen=_REMEMBERED)
        self._payload = b""
        self._work: Any = None
        self._sent = self._received = np.empty(0, np.uint8)

    @property
    def is_idle(self) -> bool:
        """Return whether no gather is in progress."""
        return self._work is None

    def begin(self, payload: bytes) -> None:
        """Start to gather a payload; errors of the group are raised."""
        self._payload = payload
        self._issue()

    def _issue(self) -> None:
        fits = len(self._payload) + _LENGTH <= self.block
        data = len(self._payload).to_bytes(_LENGTH, "little") + (self._payload if fits else b"")
        self._sent = np.zeros(self.block, np.uint8)
        self._sent[: len(data)] = np.frombuffer(data, np.uint8)
        self._received = np.empty((self._size, self.block), np.uint8)
        received, sent = torch.from_numpy(self._received.reshape(-1)), torch.from_numpy(self._sent)
        self._work = self._group._allgather_base(received, sent)

    def poll(self, patience: float = 0.0) -> list[memoryview] | None:
        """Return the payloads of all ranks, or ``None`` if they have not arrived.

        Parameters
        ----------
        patience : float
            Seconds to wait for them.

        Raises
        ------
        RuntimeError
            If a rank has failed, or the operation has timed out.
        """
        while self._work is not None:
            if not self._work.is_completed() and not (patience and self._waited(patience)):
                return None
            self._work.wait()  # raises the error of a failed operation
            self._work = None
            lengths = np.ascontiguousarray(self._received[:, :_LENGTH]).view("<i8")[:, 0].tolist()
            if (largest := max(lengths) + _LENGTH) > self.block:
                self.block = _power_of_two(largest)
                self._issue()
                continue
            self._resize(largest)
            return [self._received[rank, _LENGTH : _LENGTH + n].data for rank, n in enumerate(lengths)]
        return None

    def _waited(self, patience: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=patience))
        except RuntimeError:
            return bool(self._work.is_completed())  # failed, rather than timed out
        return True

    def _resize(self, largest: int) -> None:
        self._largest.append(largest)
        enough = _power_of_two(max(self._largest))
        if len(self._largest) == _REMEMBERED and 4 * enough <= self.block:
            self.block = max(2 * enough, _SMALLEST)

    def close(self) -> None:
        """Release the group without waiting for a running operation.

        The destructor of the group waits for that operation, so it runs in a daemon thread.
        """
        held, self._group, self._work = [self._group, self._work], None, None
        if held[1] is not None:
            BackgroundThread(held.clear, "ikkuna-gather-end").start()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()
