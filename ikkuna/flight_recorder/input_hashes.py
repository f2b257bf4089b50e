"""Hashes of the inputs of a step."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.numerics.elements import fingerprint

__all__ = ["InputHashSubscriber"]


class InputHashSubscriber(Subscriber):
    """Keeps a hash of the inputs and labels of the last sampled steps, see :func:`~ikkuna.numerics.elements.fingerprint`.

    The hashes of micro-batches and ranks are added.

    Takes ``input_data`` and ``input_labels``; publishes nothing.

    Parameters
    ----------
    sees_labels : bool
        Whether the module that computes the loss is known.
    length : int
        Number of steps.
    **options : Any
        See `Subscriber`.
    """

    def __init__(self, sees_labels: bool, length: int, **options: Any) -> None:
        super().__init__(["input_data", *(("input_labels",) if sees_labels else ())], backend="null", **options)
        self._kept: deque[tuple[int, str, float]] = deque(maxlen=4 * length)

    def measure(self, message: Any) -> Tensor | None:
        """Return the hash of a tensor."""
        return fingerprint(message.data).reshape(1) if message.data.numel() else None

    def compute(self, message: Message) -> None:
        """Keep a hash."""
        path = getattr(message, "path", "")
        self._kept.append((message.global_step, message.kind + (f" {path}" if path else ""), float(message.data[0])))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the hashes with their steps and names."""
        kept = list(self._kept)
        return {
            "hash_steps": np.array([step for step, _, _ in kept], np.int64),
            "hash_names": np.array([name for _, name, _ in kept], np.str_),
            "hashes": np.array([value for _, _, value in kept], np.float64),
        }
