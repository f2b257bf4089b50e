"""What a heatmap shows: the latest values of all modules over the steps, in a table of bounded size."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "Cells", "Heatmap"]

COLUMNS = 256


@dataclass(frozen=True, eq=False)
class Cells:
    """A heatmap at one moment.

    Parameters
    ----------
    names : of the rows
    steps : of the columns
    values : ``(row, column)``, float32
    known : ``(row, column)``, whether there was a value; it may have been NaN
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float32]
    known: NDArray[np.bool_]


class Heatmap:
    """Takes the values of a step after another.

    When the columns are used up every second one is given up, and from then on every second step is passed over:
    whatever the length of a run, between 128 and 256 steps of it are kept, evenly spread.

    Examples
    --------
    >>> heatmap = Heatmap()
    >>> for step in range(3):
    ...     heatmap.add(step, {"fc": step / 2, "out": 1.0})
    >>> cells = heatmap.cells()
    >>> cells.names, cells.steps, cells.values.tolist()
    (('fc', 'out'), (0, 1, 2), [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._steps: list[int] = []
        self._values = np.zeros((0, COLUMNS), np.float32)
        self._known = np.zeros((0, COLUMNS), np.bool_)
        self._seen = 0
        self._stride = 1

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step, which is later than those before."""
        wanted = self._seen % self._stride == 0
        self._seen += 1
        if not wanted:
            return
        if len(self._steps) == COLUMNS:
            self._thin_out()
            if (self._seen - 1) % self._stride:
                return
        column = len(self._steps)
        self._steps.append(step)
        rows = self._rows_of(values)
        with np.errstate(over="ignore"):
            self._values[rows, column] = np.fromiter(values.values(), np.float64, len(values))
        self._known[:, column] = False
        self._known[rows, column] = True

    def _rows_of(self, values: Mapping[str, float]) -> "slice | NDArray[np.intp]":
        if list(values) == self._names:  # the usual case: the same modules in the same order
            return slice(0, len(values))
        for name in values:
            self._rows.setdefault(name, len(self._rows))
        self._names = list(self._rows)
        self._grow()
        return np.fromiter((self._rows[name] for name in values), np.intp, len(values))

    def _grow(self) -> None:
        missing = len(self._rows) - len(self._values)
        if missing > 0:
            more = max(missing, len(self._values))
            self._values = np.pad(self._values, ((0, more), (0, 0)))
            self._known = np.pad(self._known, ((0, more), (0, 0)))

    def _thin_out(self) -> None:
        half = COLUMNS // 2
        for table in (self._values, self._known):
            table[:, :half] = table[:, ::2].copy()
        self._steps = self._steps[::2]
        self._stride *= 2

    def cells(self) -> Cells:
        """Return a copy of what is held."""
        part = slice(0, len(self._rows)), slice(0, len(self._steps))
        return Cells(tuple(self._rows), tuple(self._steps), self._values[part].copy(), self._known[part].copy())
