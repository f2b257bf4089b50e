"""Tensors on the host that are checked and measured in one native call."""

import numpy as np
from torch import Tensor

from ikkuna.export.rows.plan import Task
from ikkuna.export.rows.row_index import Key, RowIndex
from ikkuna.export.rows.site import Site
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native.library import flags_of
from ikkuna.numerics.statistics.native.tensor_reader import KnownTensors, TensorReader

__all__ = ["HostList"]


class HostList:
    """Collects tensors, each with its site and path, and measures them together.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._keys: list[Key] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._rows: list[int] = []
        self._flags: list[int] = []

    def add(self, site: Site, tensor: Tensor, path: str, task: Task, copy: Tensor | None = None) -> None:
        """Append a tensor, or the difference of a tensor and an earlier copy of it; all of a list are alike in this."""
        self._keys.append((site, path))
        self._tensors.append(tensor)
        self._rows.append(self._index.row(site, path))
        self._flags.append(flags_of(task.fields))
        if copy is not None:
            self._copies.append(copy)

    def measure(
        self, reader: TensorReader, statistics: HostStatistics, known: dict[str, KnownTensors]
    ) -> list[tuple[Key, Tensor, Tensor | None]]:
        """Measure all tensors; return those that have to be measured one by one, with their sites, paths and copies.

        Parameters
        ----------
        reader : TensorReader
            Measures them.
        statistics : HostStatistics
            Where their rows are.
        known : dict
            What is known of the tensors of each kind from earlier calls.
        """
        if not self._tensors:
            return []
        memory = known.setdefault(self._keys[0][0].kind, KnownTensors())
        flags, rows = np.array(self._flags, np.int32), statistics.addresses(self._rows)
        if self._copies:
            left = reader.add_differences(self._tensors, self._copies, flags, rows, memory)
        else:
            left = reader.add_all(self._tensors, flags, rows, memory)
        return [(self._keys[i], self._tensors[i], self._copies[i] if self._copies else None) for i in left]
