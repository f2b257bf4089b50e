"""Rows of statistics of tensors on a device, computed there without waiting for it."""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.elements import has_numbers, without_repeats
from ikkuna.numerics.statistics.device import operators
from ikkuna.numerics.statistics.device.buffers import (
    CodeCounts,
    CountBuffer,
    CountOwner,
    ImpreciseRows,
    KernelRows,
    RowBuffers,
    UsedStreams,
)
from ikkuna.numerics.statistics.device.exact import ExactRows
from ikkuna.numerics.statistics.device.operators import DROPPED, DeviceRows, ReducedTensor
from ikkuna.numerics.statistics.device.triton_launcher import TensorList, TritonKernels, histograms_of, triton_kernels
from ikkuna.numerics.statistics.float_code import SAMPLE, WORTH_SAMPLING, add_codes, draw_seed, merge_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS

_MOST_COUNTS = 2048  # histograms that wait to be merged, 32 MiB
_NUMBER = frozenset(("n",))
_SAMPLED = frozenset(("sampled_codes",))
_NONE: list[int] = []


class KernelStatistics:
    """The measurements of the kernels of one device in a step.

    Parameters
    ----------
    kernels : TritonKernels
        The kernels.
    counts : CodeCounts
        The histograms.

    Attributes
    ----------
    rows : RowBuffers
        The memory of the rows.
    written : list of KernelRows
        The rows.
    sizes : list of (int, int)
        Row and number of elements of tensors of which only samples are counted.
    """

    def __init__(self, kernels: TritonKernels, counts: CodeCounts) -> None:
        self.kernels, self.counts = kernels, counts
        self.rows = RowBuffers(kernels.device)
        self.written: list[KernelRows] = []
        self.sizes: list[tuple[int, int]] = []

    def add(
        self, row: int, x: Tensor, fields: frozenset[str], generator: torch.Generator | None, stream: Any
    ) -> frozenset[str] | None:
        """Measure a tensor that the kernels take.

        Returns
        -------
        frozenset of str or None
            The fields that are left, because a launch has failed; ``None`` for all of them.
        """
        n = x.numel()
        names = _counted(n, fields)
        if names or not fields <= HISTOGRAMS | {"n"}:
            counts = self.counts.of(CountOwner(row, names), n, histograms_of(n), stream) if names else None
            counted = None if counts is None else counts[: histograms_of(n)]
            written = self.kernels.measure(row, x, fields, counted, partial(self.rows.reserve, stream=stream))
            if written is None:
                return None
            self.written.append(written)
        else:
            self.sizes.append((row, n))
        if _is_sampled(n, fields):
            counts = self.counts.reserve([_sampled(row, n)], stream)
            if not self.kernels.sample(x, counts, draw_seed(generator)):
                return frozenset(("sampled_codes",))
        return frozenset()

    def add_list(
        self,
        rows: Sequence[int],
        tensors: TensorList,
        fields: frozenset[str],
        generator: torch.Generator | None,
        stream: Any,
    ) -> tuple[list[int], list[int]]:
        """Measure several tensors with one kernel, and count samples of the large ones with another one.

        Returns
        -------
        tuple of lists of int
            The numbers in the list of the tensors that are left, and of those whose samples are left.
        """
        left = list(range(len(rows)))
        chosen = [i for i in left if self._takes(i, tensors, fields)]
        if not chosen:
            return left, _NONE
        rows, xs = [rows[i] for i in chosen], [tensors.xs[i] for i in chosen]
        others = [tensors.others[i] for i in chosen] if tensors.others else []
        most = _most_counted(fields)
        owners = [
            CountOwner(row, _counted(n, fields))
            for row, n in zip(rows, (x.numel() for x in xs), strict=True)
            if n <= most
            for _ in range(histograms_of(n, in_list=True))
        ]
        counts = self.counts.reserve(owners, stream) if owners else None
        part = TensorList(xs, others, tensors.copies, counts, most)
        if (
            written := self.kernels.measure_list(rows, part, fields, partial(self.rows.reserve, stream=stream))
        ) is None:
            return left, _NONE
        self.written.append(written)
        unsampled = [chosen[i] for i in self._sample_list(rows, part, fields, generator, stream)]
        return [i for i in left if i not in set(chosen)] if len(chosen) < len(left) else _NONE, unsampled

    def _takes(self, i: int, tensors: TensorList, fields: frozenset[str]) -> bool:
        """Return whether a kernel can measure a tensor of a list."""
        kernels, x = self.kernels, tensors.xs[i]
        if not kernels.accepts(x, fields):
            return False
        y = tensors.others[i] if tensors.others else None
        if y is None:
            return True
        are_alike = x.stride() == y.stride() and x.dtype == y.dtype
        return are_alike and kernels.accepts_one(x, fields) and kernels.accepts_one(y, fields)

    def _sample_list(
        self,
        rows: Sequence[int],
        tensors: TensorList,
        fields: frozenset[str],
        generator: torch.Generator | None,
        stream: Any,
    ) -> list[int]:
        """Count samples of the large tensors of a list; return the numbers of those that are left."""
        drawn = [i for i, x in enumerate(tensors.xs) if _is_sampled(x.numel(), fields)]
        if not drawn:
            return drawn
        counts = self.counts.reserve([_sampled(rows[i], tensors.xs[i].numel()) for i in drawn], stream)
        return _NONE if self.kernels.sample_list(tensors, drawn, counts, draw_seed(generator)) else drawn

    def merge(self, other: "KernelStatistics") -> None:
        """Add the measurements of `other`, and leave it as it is."""
        self.written = self.written + other.written
        self.sizes = self.sizes + other.sizes
        self.counts.merge(other.counts)

    def drop(self, rows: Collection[int]) -> None:
        """Forget some rows."""
        self.written = [
            written._replace(owners=tuple(DROPPED if owner in rows else owner for owner in written.owners))
            for written in self.written
        ]
        self.sizes = [entry for entry in self.sizes if entry[0] not in rows]
        self.counts.drop(rows)

    def take(self) -> tuple[list[KernelRows], list[CountBuffer], list[tuple[int, int]]]:
        """Return the rows, the histograms and the sizes, and forget them."""
        taken = self.written, self.counts.take(), self.sizes
        self.rows.take()
        self.written, self.sizes = [], []
        return taken


def _most_counted(fields: frozenset[str]) -> float:
    """Return how many elements a tensor may have whose codes are all counted."""
    return math.inf if "codes" in fields else WORTH_SAMPLING if "sampled_codes" in fields else -1


def _counted(n: int, fields: frozenset[str]) -> tuple[str, ...]:
    """Return the histograms that count all of `n` elements."""
    return tuple(
        name for name in ("codes", "sampled_codes") if name in fields and not (name[0] == "s" and n > WORTH_SAMPLING)
    )


def _is_sampled(n: int, fields: frozenset[str]) -> bool:
    return "sampled_codes" in fields and n > WORTH_SAMPLING


def _sampled(row: int, n: int) -> CountOwner:
    return CountOwner(row, ("sampled_codes",), n / SAMPLE)


class DeviceStatistics:
    """A row of statistics for each number that a caller gives, and histograms beside it, on one device.

    It measures as `HostStatistics` does, and waits for the device nowhere.

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
    >>> from ikkuna.numerics.statistics.table import COLUMN
    >>> statistics, fields = DeviceStatistics(torch.device("cpu")), needed_fields(["m2", "max"])
    >>> for x in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
    ...     added = statistics.add(0, x, fields)
    >>> taken, histograms = statistics.take()
    >>> rows, values = taken.rows({name: tensor.numpy() for name, tensor in taken.tensors.items()})
    >>> rows, values[0, [COLUMN[name] for name in ("mean", "m2", "max")]].tolist()
    ([0], [3.0, 14.0, 6.0])
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
            if fields == _NUMBER:
                return False
            memory = partial(kernels.rows.reserve, stream=self._streams.note())
            if (written := kernels.kernels.measure(row, x, fields, None, memory)) is None:
                return False
            kernels.written.append(written)
            return True
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
