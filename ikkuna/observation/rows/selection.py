"""The rows of a table that a subscriber takes, and those that native functions may measure."""

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.metrics.messages.batch import BatchNames, message_name
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, MICRO_KINDS
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics.statistics.native.kernels import NOTHING, PYTHON, flags_of
from ikkuna.observation.rows.plan import Key, Plan, RowIndex

__all__ = ["MeasuredRows", "Selection", "Selections", "WantedRows"]


_FEW = 16


class Selection:
    """Some rows of one kind, and the names of their messages.

    Parameters
    ----------
    kind : str
        The kind.
    rows : array of int
        The numbers of the rows, in increasing order.
    names : BatchNames
        The modules and paths of the rows.
    """

    def __init__(self, kind: str, rows: NDArray[np.intp], names: BatchNames) -> None:
        self.kind, self.rows, self.names = kind, rows, names
        self._parts: dict[bytes, Selection] = {}

    def measured(self, is_measured: NDArray[np.bool_]) -> "Selection | None":
        """Return those of the rows that were measured in a step; ``None`` if there are none."""
        if len(is_measured) <= self.rows[-1]:  # another thread has met new modules since the step
            is_measured = np.append(is_measured, np.zeros(int(self.rows[-1]) + 1 - len(is_measured), np.bool_))
        mask = is_measured[self.rows]
        if mask.all():
            return self
        if not mask.any():
            return None
        key = mask.tobytes()
        if key not in self._parts:
            if len(self._parts) >= _FEW:  # the modules that are called change from step to step
                self._parts.clear()
            positions = np.flatnonzero(mask)
            self._parts[key] = Selection(self.kind, self.rows[positions], self.names.select(positions))
        return self._parts[key]


class MeasuredRows:
    """The rows that were measured in a step; steps that measure the same rows share what is computed here.

    Parameters
    ----------
    selections : Selections
        The rows that each subscriber takes.
    is_measured : array of bool
        Whether each row was measured.
    """

    def __init__(self, selections: "Selections", is_measured: NDArray[np.bool_]) -> None:
        self.is_measured = is_measured
        self._selections = selections
        self._of: WeakKeyDictionary[Registered, tuple[Selection, ...]] = WeakKeyDictionary()

    def of(self, registered: Registered) -> tuple[Selection, ...]:
        """Return those of the rows that a subscriber takes, those of each of its kinds together."""
        if (found := self._of.get(registered)) is None:
            some = (selection.measured(self.is_measured) for selection in self._selections.of(registered))
            found = self._of[registered] = tuple(selection for selection in some if selection is not None)
        return found


class Selections:
    """The rows that each subscriber takes; equal ones are one object, so that what is computed of them is shared.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._count = 0
        self._of: WeakKeyDictionary[Registered, tuple[Selection, ...]] = WeakKeyDictionary()
        self._equal: dict[tuple[str, bytes], Selection] = {}
        self._measured = MeasuredRows(self, np.zeros(0, np.bool_))

    def measured(self, is_measured: NDArray[np.bool_]) -> MeasuredRows:
        """Return the measured rows of a step, the same object as for the last step if they are the same."""
        if not np.array_equal(is_measured, self._measured.is_measured):
            self._measured = MeasuredRows(self, is_measured)
        return self._measured

    def of(self, registered: Registered) -> tuple[Selection, ...]:
        """Return the rows that a subscriber takes, those of each of its kinds together."""
        if self._count != len(self._index.keys):
            self._count = len(self._index.keys)
            self._of.clear()
            self._equal.clear()
        if (found := self._of.get(registered)) is None:
            made = (self._make(registered, kind) for kind in registered.kinds)
            found = self._of[registered] = tuple(selection for selection in made if len(selection.rows))
        return found

    def _make(self, registered: Registered, kind: str) -> Selection:
        keys, matches = self._index.keys, registered.matches
        rows = np.array(
            [
                row
                for row in self._index.rows_of_kind(kind)
                if (module := keys[row][0].module) is None or matches(module)
            ],
            np.intp,
        )
        key = kind, rows.tobytes()
        if key not in self._equal:
            self._equal[key] = Selection(kind, rows, self._names(kind, rows.tolist()))
        return self._equal[key]

    def _names(self, kind: str, rows: list[int]) -> BatchNames:
        places = [(site.module, path) for site, path in (self._index.keys[row] for row in rows)]
        names = (path or None if module is None else message_name(kind, module, path) for module, path in places)
        return BatchNames(tuple(module for module, _ in places), tuple(path for _, path in places), tuple(names))


class WantedRows:
    """For each plan an array with one number for each row: what the kernels measure of it, `NOTHING` or `PYTHON`.

    Native functions measure the first tensors of what modules receive and return, their gradients, and the gradients of parameters
    of one micro-batch, if a plan wants shared statistics alone.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._of: WeakKeyDictionary[Plan, NDArray[np.int32]] = WeakKeyDictionary()

    def of(self, plan: Plan) -> NDArray[np.int32]:
        """Return the array of a plan; it is another one after the index has grown."""
        known, keys = self._of.get(plan), self._index.keys
        if known is None or len(known) != len(keys):
            known = np.zeros(0, np.int32) if known is None else known
            more = [_wanted(plan, key) for key in keys[len(known) :]]
            known = self._of[plan] = np.concatenate([known, np.array(more, np.int32)])
        return known


def _wanted(plan: Plan, key: Key) -> int:
    site, path = key
    if site.kind not in MICRO_KINDS and (path or site.kind not in FORWARD_KINDS):
        return PYTHON
    task = plan.task(site.kind, site.module)
    if task is None:
        return NOTHING
    return flags_of(task.fields) if task.is_plain else PYTHON
