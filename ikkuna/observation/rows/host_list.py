"""Tensors of the host that are checked and measured in one native call at each step."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.native.kernels import NOTHING, Library, ListMemory, flags_of
from ikkuna.observation.rows.plan import Key, Plan, RowIndex, Site
from ikkuna.support.modules import NamedParameter

__all__ = ["CopiedList", "CopyMemory", "HostList", "ParameterList"]


_ALIGNED = 64


class CopyMemory:
    """Memory for copies, which is kept between steps.

    The first write to new memory costs at least as much as the copy itself.  numpy asks for huge pages for 4 MiB and more.
    """

    def __init__(self) -> None:
        self._free: dict[int, NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        """Number of bytes that are kept; buffers that are used are not counted."""
        return sum(buffer.nbytes for buffer in [*self._free.values()])

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return the smallest kept buffer of at least `size` bytes; if there is none, free the others and return a new one.

        Raises
        ------
        MemoryError
            If there is no memory.
        """
        large = sorted((buffer.nbytes, key) for key, buffer in [*self._free.items()] if buffer.nbytes >= size)
        for _, key in large:
            if (found := self._free.pop(key, None)) is not None:  # else another thread has taken it
                return found
        self._free.clear()
        return np.empty(size, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer for the next list."""
        self._free[id(buffer)] = buffer

    def release(self) -> None:
        """Free the buffers that are not used."""
        self._free.clear()


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

    The copies take as much memory as the tensors, in one buffer.

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
            len(keys), [x.nbytes if copied else 0 for x, copied in zip(tensors, is_copied, strict=True)]
        )
        self._differences = HostList(index, plan, differences)
        self._is_copied = np.array(is_copied, np.bool_)
        sizes = np.array([-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors], np.int64) * self._is_copied
        self._ends = np.cumsum(sizes)
        self._offsets = self._ends - sizes
        self._buffer: tuple[CopyMemory, NDArray[np.uint8]] | None = None

    def begin(self, kernels: Library, statistics: HostStatistics, memory: CopyMemory) -> tuple[list[int], list[int]]:
        """Measure and copy the tensors; return the positions of those that have to be measured, and copied, one by one."""
        if self._is_copied.any():
            buffer = memory.take(int(self._ends[-1]) + _ALIGNED)
            self._buffer = memory, buffer
            begin = -(-buffer.ctypes.data // _ALIGNED) * _ALIGNED
            self._memory.copy_to(np.where(self._is_copied, begin + self._offsets, 0))
        left = self.measure(kernels, statistics, self._tensors)
        return left.tolist(), np.flatnonzero(self._is_copied & ~self._memory.is_copied).tolist()

    def end(self, kernels: Library, statistics: HostStatistics) -> int:
        """Measure the differences of the tensors and their copies, and drop the copies.

        Returns the number of tensors that have another memory format, dtype or shape now.
        """
        if self._buffer is None:
            return 0
        assert kernels.reader is not None
        differences = self._differences
        addresses = statistics.addresses(differences._rows)
        left = kernels.reader.add_differences(self._tensors, differences._flags, addresses, self._memory)
        self.drop()
        return len(left)

    def drop(self) -> None:
        """Drop the copies, and give their memory back."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer[0].give_back(buffer[1])
        self._memory.done[:] = 0


def _flags(plan: Plan, key: Key) -> int:
    task = plan.task(key[0].kind, key[0].module)
    return NOTHING if task is None else flags_of(task.fields)


Wanted = Mapping[int, Site]
"""By the id of a parameter, the site of one of its tensors, if that is wanted."""


class ParameterList:
    """Some parameters, and those among them that are measured together.

    Parameters
    ----------
    index : RowIndex
        The recorder's rows.
    plan : Plan
        What is measured.
    parameters : sequence of NamedParameter
        Those whose weights, or gradients, are measured.
    sites : mapping
        The sites of these tensors.
    changing : sequence of NamedParameter
        Those whose weights change now.
    updates : mapping
        The sites of updates.

    Attributes
    ----------
    listed : list of NamedParameter
        Those that are measured together.
    others, changing_others : list of NamedParameter
        Those of which something, or the update, is wanted, and that are measured one by one.
    measured, updated : frozenset of int
        The ids of the listed parameters of which the tensor, or the update, is measured.
    rows : CopiedList
        Measures the listed parameters.
    """

    def __init__(
        self,
        index: RowIndex,
        plan: Plan,
        parameters: Sequence[NamedParameter],
        sites: Wanted,
        changing: Sequence[NamedParameter],
        updates: Wanted,
    ) -> None:
        named = {id(each.parameter): each for each in (*parameters, *changing)}
        of_tensor = {key: sites[key] for key in (id(each.parameter) for each in parameters) if key in sites}
        of_update = {key: updates[key] for key in (id(each.parameter) for each in changing) if key in updates}
        listed = {key: _is_listed(each, plan, of_tensor.get(key), of_update.get(key)) for key, each in named.items()}
        wanted = [key for key in named if key in of_tensor or key in of_update]
        keys = [key for key in wanted if listed[key]]
        self.listed = [named[key] for key in keys]
        self.others = [named[key] for key in wanted if not listed[key]]
        self.changing_others = [named[key] for key in wanted if not listed[key] and key in of_update]
        self.measured, self.updated = (frozenset(of.keys() & set(keys)) for of in (of_tensor, of_update))
        measured, differences = (
            [(of[key], named[key].path) if key in of else None for key in keys] for of in (of_tensor, of_update)
        )
        self.rows = CopiedList(index, plan, measured, differences, [each.parameter for each in self.listed])


def _is_listed(named: NamedParameter, plan: Plan, *sites: Site | None) -> bool:
    tasks = [plan.task(site.kind, site.module) for site in sites if site is not None]
    is_plain = all(task is not None and task.is_plain for task in tasks)
    x = named.parameter
    return is_plain and type(x) is nn.Parameter and x.is_cpu and x.layout is torch.strided
