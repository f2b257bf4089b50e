"""The values of all modules at some steps, in a table of bounded size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.pictures.decimator import Decimator, keep_first

__all__ = ["CAPACITY", "Heatmap", "HeatmapView"]

CAPACITY = 256
"""Largest number of columns."""


@dataclass(frozen=True, eq=False)
class HeatmapView:
    """A copy of a heat map.

    Parameters
    ----------
    names : tuple of str
        The modules of the rows.
    steps : tuple of int
        The steps of the columns.
    values : ndarray
        (row, column), float32
    known : ndarray
        (row, column), whether there is a value; it may be NaN.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.float32]
    known: NDArray[np.bool_]


class _Column(NamedTuple):
    """The values of a step, and their rows."""

    step: int
    rows: "slice | NDArray[np.intp]"
    values: NDArray[np.float32]


class Heatmap:
    """Keeps the values of up to 256 evenly spaced steps, with a row for each module.

    Examples
    --------
    >>> heatmap = Heatmap()
    >>> for step in range(3):
    ...     heatmap.add(step, {"fc": step / 2, "out": 1.0})
    >>> view = heatmap.view()
    >>> view.names, view.steps, view.values.tolist()
    (('fc', 'out'), (0, 1, 2), [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._columns: Decimator[_Column] = Decimator(CAPACITY, keep_first)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step, which is later than those before."""
        if not self._columns.begins_entry:
            self._columns.skip()
            return
        with np.errstate(over="ignore"):
            column = np.fromiter(values.values(), np.float32, len(values))
        self._columns.add(_Column(step, self._rows_of(values), column))

    def _rows_of(self, values: Mapping[str, float]) -> "slice | NDArray[np.intp]":
        if list(values) == self._names:  # the usual case: the same modules in the same order
            return slice(0, len(values))
        for name in values:
            self._rows.setdefault(name, len(self._rows))
        self._names = list(self._rows)
        return np.fromiter((self._rows[name] for name in values), np.intp, len(values))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self._names), len(self._columns)

    def view(self) -> HeatmapView:
        """Return a copy of the values."""
        columns = self._columns.entries()
        values = np.zeros((len(self._names), len(columns)), np.float32)
        known = np.zeros(values.shape, np.bool_)
        for i, column in enumerate(columns):
            values[column.rows, i] = column.values
            known[column.rows, i] = True
        return HeatmapView(tuple(self._names), tuple(column.step for column in columns), values, known)
