"""The loss, the learning rates and the duration of the last steps, in memory of a fixed size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepLog"]

_LENGTH = 512


class StepLog:
    """Keeps a few numbers of each of the last 512 steps.

    Examples
    --------
    >>> log = StepLog()
    >>> for step in range(600):
    ...     log.add(step, 1.0, {"0": 0.1}, 0.5, False)
    >>> arrays = log.arrays()
    >>> len(arrays["log_steps"]), int(arrays["log_steps"][0]), arrays["learning_rates"].shape
    (512, 88, (512, 1))
    """

    def __init__(self) -> None:
        self._steps = np.full(_LENGTH, -1, np.int64)
        self._numbers = np.full((_LENGTH, 3), np.nan)
        self._rates = np.full((_LENGTH, 1), np.nan)
        self._groups: dict[str, int] = {}
        self._next = 0

    def add(self, step: int, loss: float, rates: Mapping[str, Any], seconds: float, skipped: bool) -> None:
        """Add a step; `loss` and `seconds` are NaN if they are unknown."""
        slot = self._next
        self._steps[slot] = -1
        self._numbers[slot] = loss, seconds, skipped
        for name, rate in rates.items():
            column = self._groups.get(name)
            if column is None:
                column = self._new_group(name)
            self._rates[slot, column] = rate if isinstance(rate, float | int) else np.nan
        self._steps[slot] = step
        self._next = (slot + 1) % _LENGTH

    def _new_group(self, name: str) -> int:
        column = self._groups[name] = len(self._groups)
        if column >= self._rates.shape[1]:
            self._rates = np.concatenate([self._rates, np.full((_LENGTH, 1), np.nan)], axis=1)
        return column

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of all steps in the order of time."""
        order = np.roll(np.arange(_LENGTH), -self._next)
        order = order[self._steps[order] >= 0]
        loss, seconds, skipped = self._numbers[order].T
        return {
            "log_steps": self._steps[order].copy(),
            "loss": loss.copy(),
            "seconds": seconds.copy(),
            "skipped": skipped > 0,
            "learning_rates": self._rates[order].copy(),
            "groups": np.array(list(self._groups), dtype=np.str_),
        }
