"""What every rank has to say, brought to every rank while training goes on."""

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import numpy as np
import torch

__all__ = ["Gather"]

_LENGTH = 8
_SMALLEST = 1 << 12
_REMEMBERED = 16


class Gather:
    """All-gathers payloads of bytes, one at a time, in blocks of one size.

    Gloo aborts the process where sizes differ within an operation, so every rank sends a block of the same size,
    ``[length of the payload, payload, padding]``.  All ranks see all lengths: where one payload did not fit,
    all agree on the next power of two that fits and gather the same again; and where the largest of the last 16 fits into
    a quarter of the block, on a smaller one.  So a gather is one operation, but for the first and those that grow.

    Parameters
    ----------
    group : a process group of our own
    size : number of ranks
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
        """Whether nothing is under way."""
        return self._work is None

    def begin(self, payload: bytes) -> None:
        """Send a payload; raise what the group raises."""
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
        """Return the payloads of all ranks, or ``None`` while they are under way.

        Parameters
        ----------
        patience : how many seconds to wait for them

        Raises
        ------
        RuntimeError
            If a rank is gone, or the operation has taken too long.
        """
        while self._work is not None:
            if not self._work.is_completed() and not (patience and self._waited(patience)):
                return None
            self._work.wait()  # raises what has failed
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
            return bool(self._work.is_completed())  # it failed, rather than took too long
        return True

    def _resize(self, largest: int) -> None:
        self._largest.append(largest)
        enough = _power_of_two(max(self._largest))
        if len(self._largest) == _REMEMBERED and 4 * enough <= self.block:
            self.block = max(2 * enough, _SMALLEST)

    def close(self) -> None:
        """Let the group go, without waiting for what is under way.

        Its end waits for a running operation, so it has to come on a thread of its own, which nobody waits for.
        """
        held, self._group, self._work = [self._group, self._work], None, None
        if held[1] is not None:
            threading.Thread(target=held.clear, name="ikkuna-gather-end", daemon=True).start()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()
