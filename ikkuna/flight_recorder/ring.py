"""The last steps in memory of a fixed size: their rows, losses, learning rates and durations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values

_FIRST_CAPACITY = 64


class Tasks(Protocol):
    """The plan of a step, which names the statistics that were measured."""

    def task(self, kind: str, module: str | None) -> Any:
        """Return an object with the attribute `fields`; ``None`` if nothing was measured."""


class StepRows(NamedTuple):
    """The rows of some steps.

    Parameters
    ----------
    steps : array
        ``(steps,)``, int64, in the order of time.
    values : array
        ``(steps, rows, columns)``, float64; NaN for what was not measured.
    """

    steps: NDArray[np.int64]
    values: Values


class RowRing:
    """Keeps the tables of the last steps; memory is reused, and grows only if a step has more rows than any before.

    A slot is marked as empty while it is written, so that a snapshot in a signal handler or in another thread never has half a step.

    Parameters
    ----------
    length : int
        Number of steps.
    max_bytes : int
        The largest size of the tables of all steps; the last rows of larger ones are not kept.
    """

    def __init__(self, length: int, max_bytes: int) -> None:
        self._max_rows = max(max_bytes // (length * len(COLUMNS) * 8), 1)
        self._steps = np.full(length, -1, np.int64)
        self._counts = np.zeros(length, np.int64)
        self._values = np.empty((length, min(_FIRST_CAPACITY, self._max_rows), len(COLUMNS)))
        self._tasks: list[Tasks | None] = [None] * length
        self._next = 0

    def add(self, step: int, values: Values, tasks: Tasks) -> None:
        """Copy the table of a step over that of the oldest one."""
        slot, count = self._next, min(len(values), self._max_rows)
        if count > self._values.shape[1]:
            self._grow(count)
        self._steps[slot] = -1
        self._values[slot, :count] = values[:count]
        self._counts[slot], self._tasks[slot] = count, tasks
        self._steps[slot] = step
        self._next = (slot + 1) % len(self._steps)

    def _grow(self, count: int) -> None:
        wider = np.empty((len(self._steps), min(2 * count, self._max_rows), len(COLUMNS)))
        wider[:, : self._values.shape[1]] = self._values
        self._values = wider

    @property
    def last_step(self) -> int:
        """The step that was added last; -1 before the first."""
        return int(self._steps[self._next - 1])

    def snapshot(self, keys: Sequence[tuple[Any, str]]) -> StepRows:
        """Return a copy of all steps, with NaN for what was not measured.

        Parameters
        ----------
        keys : sequence of tuple
            For each row an object with the attributes `kind` and `module`, and the path.
        """
        length = len(self._steps)
        order = [i for i in ((self._next + i) % length for i in range(length)) if self._steps[i] >= 0]
        rows = int(self._counts[order].max()) if order else 0
        found = np.full((len(order), rows, len(COLUMNS)), np.nan)
        masks: dict[int, NDArray[np.bool_]] = {}
        for i, slot in enumerate(order):
            tasks, count = self._tasks[slot], int(self._counts[slot])
            if id(tasks) not in masks:
                masks[id(tasks)] = measured_columns(tasks, keys[:rows])
            values = self._values[slot, :count]
            is_known = masks[id(tasks)][:count] & (values[:, :1] > 0)
            found[i, :count] = np.where(is_known, values, np.nan)
        return StepRows(self._steps[order].copy(), found)


def measured_columns(tasks: Tasks | None, keys: Sequence[tuple[Any, str]]) -> NDArray[np.bool_]:
    """Return which columns ``(rows, columns)`` were measured."""
    mask = np.zeros((len(keys), len(COLUMNS)), np.bool_)
    for row, (site, _) in enumerate(keys):
        if tasks is not None and (task := tasks.task(site.kind, site.module)) is not None:
            mask[row, [COLUMN[name] for name in task.fields if name in COLUMN]] = True
    return mask


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
