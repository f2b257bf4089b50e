"""Which rows native functions may measure, and how."""

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.metrics.messages.kinds import FORWARD_KINDS, MICRO_KINDS
from ikkuna.numerics.statistics.native.kernels import NOTHING, PYTHON, flags_of
from ikkuna.observation.rows.plan import Key, Plan, RowIndex

__all__ = ["WantedRows"]


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
