"""Tensors of the host that are checked and measured in one native call at each step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native.kernels import NOTHING, Library, ListMemory, flags_of
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.row_index import Key, RowIndex

__all__ = ["CopiedList", "HostList"]


_CHUNK = 1 << 26  # bytes; numpy asks for huge pages for 4 MiB and more, and other pages cost more than the copy itself
_KEPT = 1 << 22
_ALIGNED = 64


class HostList:
    """The rows of a list of tensors, and what is measured of them.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    plan : Plan
        What is measured.
    keys : sequence of Key or None
        The site and path of each tensor; ``None`` for nothing.
    """

    def __init__(self, index: RowIndex, plan: Plan, keys: Sequence[Key | None]) -> None:
        self._rows = np.array([0 if key is None else index.row(*key) for key in keys], np.int64)
        self._flags = np.array([NOTHING if key is None else _flags(plan, key) for key in keys], np.int32)
        self._memory = ListMemory(len(keys))

    def measure(
        self, kernels: Library, statistics: HostStatistics, tensors: Sequence[Tensor | None]
    ) -> NDArray[np.intp]:
        """Measure the tensors; return the positions of those that have to be measured one by one."""
        assert kernels.reader is not None
        addresses = statistics.addresses(self._rows)
        return kernels.reader.add_all(list(tensors), self._flags, addresses, self._memory)


class CopiedList(HostList):
    """A list of tensors that are measured and copied in one pass, and their differences to the copies later.

    The copies take as much memory as the tensors, in chunks of 64 MiB or of a larger tensor, until the differences are measured.
    A first chunk of at most 4 MiB is kept longer.

    Parameters
    ----------
    index, plan, keys
        See `HostList`.
    differences : sequence of Key or None
        The site and path of the difference of each tensor; ``None`` if the tensor is not copied.
    tensors : sequence of Tensor
        The tensors.
    """

    def __init__(
        self,
        index: RowIndex,
        plan: Plan,
        keys: Sequence[Key | None],
        differences: Sequence[Key | None],
        tensors: Sequence[Tensor],
    ) -> None:
        super().__init__(index, plan, keys)
        self._tensors = list(tensors)
        is_copied = [key is not None for key in differences]
        self._memory = ListMemory(
            len(keys), [x.numel() if copied else 0 for x, copied in zip(tensors, is_copied, strict=True)]
        )
        self._differences = HostList(index, plan, differences)
        self._is_copied = np.array(is_copied, np.bool_)
        self._chunk_of = np.zeros(len(keys), np.int64)
        self._offset = np.zeros(len(keys), np.int64)
        self._sizes: list[int] = []
        for i in np.flatnonzero(self._is_copied).tolist():
            size = -(-tensors[i].nbytes // _ALIGNED) * _ALIGNED
            if not self._sizes or self._sizes[-1] + size > _CHUNK:
                self._sizes.append(0)
            self._chunk_of[i], self._offset[i] = len(self._sizes) - 1, self._sizes[-1]
            self._sizes[-1] += size
        self._chunks: list[NDArray[np.uint8]] = []

    def begin(self, kernels: Library, statistics: HostStatistics) -> tuple[list[int], list[int]]:
        """Measure and copy the tensors; return the positions of those that have to be measured, and copied, one by one."""
        self._chunks += [np.empty(size, np.uint8) for size in self._sizes[len(self._chunks) :]]
        if self._chunks:
            bases = np.array([chunk.ctypes.data for chunk in self._chunks])
            self._memory.copy_to(np.where(self._is_copied, bases[self._chunk_of] + self._offset, 0))
        left = self.measure(kernels, statistics, self._tensors)
        return left.tolist(), np.flatnonzero(self._is_copied & ~self._memory.is_copied).tolist()

    def end(self, kernels: Library, statistics: HostStatistics) -> int:
        """Measure the differences of the tensors and their copies, and drop the copies.

        Returns the number of tensors that have another memory format, dtype or shape now.
        """
        if not self._chunks:
            return 0
        assert kernels.reader is not None
        differences = self._differences
        addresses = statistics.addresses(differences._rows)
        left = kernels.reader.add_differences(self._tensors, differences._flags, addresses, self._memory)
        self.drop()
        return len(left)

    def drop(self) -> None:
        """Drop the copies, except a first small chunk, which the next step reuses."""
        self._chunks = [chunk for chunk in self._chunks[:1] if chunk.nbytes <= _KEPT]
        self._memory.done[:] = 0


def _flags(plan: Plan, key: Key) -> int:
    task = plan.task(key[0].kind, key[0].module)
    return NOTHING if task is None else flags_of(task.fields)
