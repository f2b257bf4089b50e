"""The values of all modules at some steps, in a table of bounded size.

Adds the modules that a heat map should have and that never arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.pictures.chart import Decimator, keep_first
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.values import ModuleEntry, ModuleOrder

CAPACITY = 256
"""Largest number of columns at even distances; the last step may be one more."""


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
    quantity : Quantity
        What the kind is, which decides the scale of colours.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    values: NDArray[np.floating[Any]]
    known: NDArray[np.bool_]
    quantity: Quantity = NEUTRAL


class _Column(NamedTuple):
    """The values of a step, and their rows."""

    step: int
    rows: "slice | NDArray[np.intp]"
    values: NDArray[np.floating[Any]]


class Heatmap:
    """Keeps the values of up to 256 evenly spaced steps, and of the last one, with a row for each module.

    Examples
    --------
    >>> heatmap = Heatmap()
    >>> for step in range(3):
    ...     heatmap.add(step, ("fc", "out"), np.array([step / 2, 1.0]))
    >>> view = heatmap.view()
    >>> view.names, view.steps, view.values.tolist()
    (('fc', 'out'), (0, 1, 2), [[0.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        self._latest: Sequence[str] = ()
        self._columns: Decimator[_Column] = Decimator(CAPACITY, keep_first)
        self._last: _Column | None = None

    def add(self, step: int, names: Sequence[str], values: NDArray[np.floating[Any]]) -> None:
        """Add one value of each name at a step, which is later than those before."""
        rows = slice(0, len(names)) if names is self._latest else self._rows_of(names)
        if values.dtype != np.float32:
            with np.errstate(over="ignore"):
                values = values.astype(np.float32)
        self._last = _Column(step, rows, values)
        self._columns.add(self._last)

    def _rows_of(self, names: Sequence[str]) -> "slice | NDArray[np.intp]":
        if list(names) != self._names:
            for name in names:
                self._rows.setdefault(name, len(self._rows))
            self._names = list(self._rows)
            return np.fromiter((self._rows[name] for name in names), np.intp, len(names))
        self._latest = names  # the usual case: the same modules in the same order
        return slice(0, len(names))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self._names), len(self._columns)

    def view(self) -> HeatmapView:
        """Return a copy of the values."""
        columns = list(self._columns.entries())
        if self._last is not None and columns and columns[-1].step != self._last.step:
            columns.append(self._last)
        values = np.zeros((len(self._names), len(columns)), np.float32)
        known = np.zeros(values.shape, np.bool_)
        for i, column in enumerate(columns):
            values[column.rows, i] = column.values
            known[column.rows, i] = True
        return HeatmapView(tuple(self._names), tuple(column.step for column in columns), values, known)


_OF_MODULES = frozenset(("activations", "layer_gradients"))
_OF_WEIGHTS = frozenset(("weights", "weight_gradients", "weight_updates"))


def with_missing_rows(
    modules: Sequence[ModuleEntry],
    quantity: Quantity,
    names: tuple[str, ...],
    values: NDArray[np.float64],
    present: NDArray[np.bool_],
) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.bool_]]:
    """Return names and values with an empty row for each module without a value, in the order of the network.

    If most modules have no value, the kind was recorded for some modules only, and nothing is added.

    Examples
    --------
    >>> modules = [ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in ("a", "b", "c")]
    >>> with_missing_rows(modules, Quantity(sources=("weights",)), ("a", "c"), np.ones((2, 1)), np.ones((2, 1), bool))[0]
    ('a', 'b', 'c')
    """
    known = set(names)
    wanted = [name for name in _expected(modules, frozenset(quantity.sources)) if name not in known]
    if not wanted or len(wanted) > len(names):
        return names, values, present
    order = ModuleOrder(modules)
    every = sorted((*names, *wanted), key=order.key)
    place = {name: row for row, name in enumerate(every)}
    places = [place[name] for name in names]
    filled, there = np.full((len(every), values.shape[1]), np.nan), np.zeros((len(every), values.shape[1]), bool)
    filled[places], there[places] = values, present
    return tuple(every), filled, there


def _expected(modules: Sequence[ModuleEntry], sources: frozenset[str]) -> list[str]:
    if sources & _OF_MODULES:
        return [entry.name for entry in modules]
    if sources & _OF_WEIGHTS:
        return [entry.name for entry in modules if any(name == "weight" for name, _ in entry.parameters)]
    return []
