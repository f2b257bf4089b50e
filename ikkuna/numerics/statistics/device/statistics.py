"""Rows of statistics of tensors on a device, computed there without waiting for it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.numerics.elements import has_numbers, without_repeats
from ikkuna.numerics.statistics.device import operators
from ikkuna.numerics.statistics.device.buffers import CodeCounts, ImpreciseRows, KernelRows, UsedStreams
from ikkuna.numerics.statistics.device.exact import ExactRows
from ikkuna.numerics.statistics.device.kernel_statistics import KernelStatistics
from ikkuna.numerics.statistics.device.operators import DeviceRows, ReducedTensor
from ikkuna.numerics.statistics.device.triton_launcher import TensorList, triton_kernels
from ikkuna.numerics.statistics.float_code import add_codes, merge_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, record_of
from ikkuna.numerics.statistics.table import EMPTY

_MOST_COUNTS = 2048  # histograms that wait to be merged, 32 MiB
_NUMBER = frozenset(("n",))
_SAMPLED = frozenset(("sampled_codes",))


class DeviceStatistics:
    """A row of statistics for each number that a caller gives, and histograms beside it, on one device.

    `HostStatistics` has the same methods.  Only `record` waits for the device.

    Parameters
    ----------
    device : torch.device
        The device of the tensors.
    imprecise : ImpreciseRows, optional
        Which rows are measured in float64.

    Attributes
    ----------
    codes : dict
        Histograms by row and field.

    Examples
    --------
    >>> from ikkuna.numerics.statistics import needed_fields
    >>> statistics, fields = DeviceStatistics(torch.device("cpu")), needed_fields(["m2", "max"])
    >>> for x in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
    ...     added = statistics.add(0, x, fields)
    >>> record = statistics.record(0, fields)
    >>> record.mean, record.variance(), record.max
    (3.0, 4.666666666666667, 6.0)
    """

    def __init__(self, device: torch.device, imprecise: ImpreciseRows | None = None) -> None:
        self.device = device
        self.codes: dict[int, dict[str, Tensor]] = {}
        self._imprecise = ImpreciseRows() if imprecise is None else imprecise
        self._exact = ExactRows()
        self._reduced: list[ReducedTensor] = []
        self._settled: list[DeviceRows] = []
        self._streams = UsedStreams(device)
        kernels = triton_kernels(device)
        self._kernels = None if kernels is None else KernelStatistics(kernels, CodeCounts(device))

    def add(
        self,
        row: int,
        x: Tensor,
        fields: frozenset[str],
        weight: float | Tensor = 1,
        generator: torch.Generator | None = None,
    ) -> bool:
        """Add the statistics of the elements of `x` to a row; parameters are those of `HostStatistics.add`."""
        if not has_numbers(x):
            return False
        stream = self._streams.note()
        repeated = x
        x, times = without_repeats(x)
        weight = weight * times
        is_weighted = isinstance(weight, Tensor) or weight != 1
        if x.numel():
            is_taken = not is_weighted and self._kernels is not None and self._kernels.kernels.accepts_one(x, fields)
            if is_taken and self._add_with_kernels(row, x, fields, generator, stream):
                return True
            is_precise = not is_weighted and row not in self._imprecise
            if is_precise and operators.accepts(x, fields) and not _overlaps(x):
                for part in operators.split(x, fields):
                    self._reduced.append(ReducedTensor(row, part.numel(), fields, operators.reduce(part, fields)))
            else:
                self._exact.add(row, x, fields, weight)
        if not fields.isdisjoint(HISTOGRAMS):
            add_codes(self.codes.setdefault(row, {}), repeated, fields, generator)
        return True

    def try_add(self, row: int, x: Tensor, fields: frozenset[str], generator: torch.Generator | None = None) -> bool:
        """Add a plain tensor, which may be attached to a graph, with kernels and few checks; return whether that was done."""
        if (kernels := self._kernels) is None or not kernels.kernels.takes(x):
            return False
        if fields.isdisjoint(HISTOGRAMS):
            return fields != _NUMBER and kernels.add_plain(row, x, fields, self._streams.note())
        return self._add_with_kernels(row, x, fields, generator, self._streams.note())

    def _add_with_kernels(
        self, row: int, x: Tensor, fields: frozenset[str], generator: torch.Generator | None, stream: Any
    ) -> bool:
        """Measure a tensor that the Triton kernels take; return whether the launch succeeds."""
        kernels = self._kernels
        assert kernels is not None
        left = kernels.add(row, x, fields, generator, stream)
        if left is None:
            return False
        if left:
            add_codes(self.codes.setdefault(row, {}), x, left, generator)
        self._settle_counts(kernels)
        return True

    def add_all(
        self,
        rows: Sequence[int],
        tensors: Sequence[Tensor],
        fields: frozenset[str],
        generator: torch.Generator | None = None,
        copies: Sequence[Tensor | None] = (),
    ) -> None:
        """Add the statistics of several tensors of one dtype, each to its row; norms of all take few launches.

        Parameters
        ----------
        rows, tensors, fields, generator
            See `add`.
        copies : sequence of Tensor or None
            Where to copy the tensors to, each with the shape and strides of its tensor; the kernel that reads them does so.
        """
        left = self._add_list(rows, TensorList(tensors, copies, copies=True), fields, generator)
        wanted = [(copy, tensors[i]) for i in left if copies and (copy := copies[i]) is not None]
        if wanted:
            torch._foreach_copy_([copy for copy, _ in wanted], [x for _, x in wanted])
        together = [
            (rows[i], tensors[i])
            for i in left
            if operators.accepts_list(tensors[i], fields) and rows[i] not in self._imprecise and tensors[i].numel()
        ]
        if together:
            results = operators.reduce_list([x for _, x in together], fields)
            for (row, x), found in zip(together, results, strict=True):
                self._reduced.append(ReducedTensor(row, x.numel(), fields, found))
        done = {row for row, _ in together}
        for i in left:
            if rows[i] not in done:
                self.add(rows[i], tensors[i], fields, generator=generator)

    def add_differences(
        self,
        rows: Sequence[int],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        fields: frozenset[str],
        generator: torch.Generator | None = None,
    ) -> None:
        """Add the statistics of ``x - y``, in at least float32, of several pairs of one dtype; `ys` may be overwritten."""
        if not (left := self._add_list(rows, TensorList(xs, ys), fields, generator)):
            return
        rows, xs, ys = [rows[i] for i in left], [xs[i] for i in left], [ys[i] for i in left]
        if xs[0].dtype.itemsize < 4:
            for row, x, y in zip(rows, xs, ys, strict=True):
                self.add(row, x.float().sub_(y), fields, generator=generator)
            return
        torch._foreach_sub_(ys, xs)
        torch._foreach_neg_(ys)
        self.add_all(rows, ys, fields, generator)

    def _add_list(
        self, rows: Sequence[int], tensors: TensorList, fields: frozenset[str], generator: torch.Generator | None
    ) -> list[int]:
        """Measure several tensors with Triton kernels; return the numbers of those that are left."""
        stream = self._streams.note()
        if (kernels := self._kernels) is None:
            return list(range(len(rows)))
        left, unsampled = kernels.add_list(rows, tensors, fields, generator, stream)
        for i in unsampled:
            y = None if tensors.copies or not tensors.others else tensors.others[i]
            x = tensors.xs[i] if y is None else tensors.xs[i].float() - y
            add_codes(self.codes.setdefault(rows[i], {}), x, _SAMPLED, generator)
        self._settle_counts(kernels)
        return left

    def _settle_counts(self, kernels: KernelStatistics) -> None:
        """Merge the histograms of samples, of which each call has its own, before they need much memory."""
        if len(kernels.counts) > _MOST_COUNTS:
            self._streams.wait()
            taken = DeviceRows([], [], self._imprecise, (), kernels.kernels, kernels.counts.take())
            self._settled.append(taken)  # its memory may belong to other streams
            merge_codes(self.codes, taken.codes(taken.tensors))

    def add_difference(self, row: int, x: Tensor, y: Tensor, fields: frozenset[str]) -> bool:
        """Add the statistics of ``x - y``, computed in at least float32, to a row; return whether these tensors have numbers."""
        return self.add(row, x.to(torch.promote_types(x.dtype, torch.float32)) - y, fields)

    def record(self, row: int, fields: frozenset[str]) -> Record:
        """Return the `fields` of a row; this waits for the device."""
        exact = [found for found in self._exact.found if found.row == row]
        reduced = [found for found in self._reduced if found.row == row]
        if (kernels := self._kernels) is None:
            taken = DeviceRows(exact, reduced, self._imprecise)
        else:
            written = [
                KernelRows((row,) * sum(mine), rows.values[torch.tensor(mine, device="cpu").to(rows.values.device)])
                for rows in kernels.written
                if any(mine := [owner == row for owner in rows.owners])
            ]
            reduced += (ReducedTensor(row, n, _NUMBER, []) for owner, n in kernels.sizes if owner == row)
            taken = DeviceRows(exact, reduced, self._imprecise, written, kernels.kernels, kernels.counts.used())
        arrays = {name: tensor.cpu().numpy() for name, tensor in taken.tensors.items()}
        _, values = taken.rows({name: array.astype(np.float64) for name, array in arrays.items()})
        record = record_of(values[0] if len(values) else EMPTY, fields)
        codes = taken.codes(arrays)
        merge_codes(codes, {row: {name: counts.cpu().numpy() for name, counts in self.codes.get(row, {}).items()}})
        for name, counts in codes[row].items():
            setattr(record, name, counts)
        return record

    def merge(self, other: "DeviceStatistics") -> None:
        """Add the rows of `other`, and leave it as it is."""
        self._exact.merge(other._exact)
        self._streams.merge(other._streams)
        if self._kernels is not None and other._kernels is not None:
            self._kernels.merge(other._kernels)
        self._settled += other._settled
        self._reduced += other._reduced
        merge_codes(self.codes, other.codes)

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Empty some rows, or all."""
        if rows is None:
            self._exact.take()
            if self._kernels is not None:
                self._kernels.take()
            self._reduced, self._settled, self.codes = [], [], {}
            return
        dropped = set(rows)
        self._exact.drop(dropped)
        self._reduced = [found for found in self._reduced if found.row not in dropped]
        if self._kernels is not None:
            self._kernels.drop(dropped)
        for row in dropped:
            self.codes.pop(row, None)

    def take(self) -> tuple[DeviceRows, dict[int, dict[str, Tensor]]]:
        """Return everything that was measured, and the histograms; empty all rows."""
        self._streams.take()
        exact, reduced, settled, codes = self._exact.take(), self._reduced, self._settled, self.codes
        self._reduced, self._settled, self.codes = [], [], {}
        if (kernels := self._kernels) is None:
            return DeviceRows(exact, reduced, self._imprecise), codes
        written, counted, sizes = kernels.take()
        reduced += (ReducedTensor(row, n, _NUMBER, []) for row, n in sizes)
        taken = DeviceRows(exact, reduced, self._imprecise, written, kernels.kernels, counted)
        taken.keep(settled)
        return taken, codes


def _overlaps(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, so that a copy of it would be larger than its storage."""
    is_plain = type(x) is Tensor and x.layout is torch.strided
    return is_plain and x.numel() * x.element_size() > x.untyped_storage().nbytes()
