"""Rows of statistics of tensors on a device, computed there without waiting for it."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import flatten, has_numbers, pieces, readable, without_repeats
from ikkuna.numerics.statistics.device import operators
from ikkuna.numerics.statistics.device.code_counts import CodeCounts, CountBuffer, CountOwner
from ikkuna.numerics.statistics.device.doubts import Doubts
from ikkuna.numerics.statistics.device.exact import measure_exactly
from ikkuna.numerics.statistics.device.triton_launcher import (
    TensorList,
    TritonKernels,
    Written,
    histograms_of,
    triton_kernels,
)
from ikkuna.numerics.statistics.float_code import SAMPLE, WORTH_SAMPLING, add_codes, draw_seed, merge_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, record_of
from ikkuna.numerics.statistics.table import EMPTY, Values, merge_rows, repeat_rows, row_of

__all__ = ["DeviceStatistics", "ReducedTensor", "Taken"]

_DROPPED = -1  # the owner of written rows that were cleared
_PIECE = 1 << 18  # elements of a tensor that is read in parts
_MOST_EXACT = 256  # rows of float64 that wait to be merged
_MOST_COUNTS = 2048  # histograms that wait to be merged, 32 MiB
_NUMBER = frozenset(("n",))
_SAMPLED = frozenset(("sampled_codes",))


class ReducedTensor(NamedTuple):
    """The reductions of one tensor.

    Parameters
    ----------
    row : int
        The row that they belong to.
    n : int
        Number of elements.
    fields : frozenset of str
        What was measured.
    results : list of Tensor
        See `operators.reduce`.
    """

    row: int
    n: int
    fields: frozenset[str]
    results: list[Tensor]


class Taken:
    """Measurements of a step on a device.

    Parameters
    ----------
    exact : list of (int, frozenset, Tensor)
        Rows measured in float64: their numbers, fields and values.
    reduced : list of ReducedTensor
        Rows measured in float32.
    doubts : Doubts
        Learns which rows float32 is not enough for.
    written : list of Written
        Rows that Triton kernels write.
    kernels : TritonKernels, optional
        Those kernels.
    counted : list of CountBuffer
        The histograms that Triton kernels count.

    Attributes
    ----------
    tensors : dict
        The tensors to copy to the host.
    numbers : set of int
        The rows that were measured.
    count : int
        Number of `tensors`.
    """

    def __init__(
        self,
        exact: list[Any],
        reduced: list[ReducedTensor],
        doubts: Doubts,
        written: Sequence[Written] = (),
        kernels: TritonKernels | None = None,
        counted: Sequence[CountBuffer] = (),
    ) -> None:
        self._exact, self._reduced, self._doubts = exact, reduced, doubts
        self._merged: tuple[int, ...] = ()
        self._counts: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self.tensors: dict[Any, Tensor] = {}
        if written and kernels is not None:
            self._merged, self.tensors["merged"] = kernels.merge(written)
        if counted and kernels is not None:
            self._counts, self.tensors["counts"] = kernels.merge_counts(counted)
        self.numbers = {*(row for row, *_ in exact), *(measured.row for measured in reduced), *self._merged} - {
            _DROPPED
        }
        if exact:
            self.tensors["exact"] = torch.stack([values for _, _, values in exact])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for measured in reduced:
            for result in measured.results:
                by_dtype.setdefault(result.dtype, []).append(result)
        self.tensors |= {dtype: torch.stack(results) for dtype, results in by_dtype.items()}
        self.count = len(self.tensors)
        self._kept: list[Any] = [
            written,
            counted,
        ]  # kept until the copy has arrived: their memory may belong to other streams

    def keep(self, objects: Iterable[Any]) -> None:
        """Keep objects alive until the copy has arrived."""
        self._kept += objects

    def codes(self, arrays: dict[Any, Any]) -> dict[int, dict[str, Any]]:
        """Return the histograms that kernels have counted, by row and field.

        Parameters
        ----------
        arrays : dict
            `tensors`, or their copies.
        """
        found: dict[int, dict[str, Any]] = {}
        for (row, names), counts in zip(self._counts, arrays.get("counts", ()), strict=True):
            if row != _DROPPED:
                merge_codes(found, {row: dict.fromkeys(names, counts)})
        return found

    def rows(self, arrays: dict[Any, NDArray[Any]]) -> tuple[list[int], Values]:
        """Return the numbers of the measured rows, each once, and their values ``(rows, columns)``.

        Parameters
        ----------
        arrays : dict
            The copies of `tensors`.
        """
        found: dict[int, list[Values]] = {}
        for row, values in zip(self._merged, arrays.get("merged", ()), strict=True):
            if row != _DROPPED:
                found.setdefault(row, []).append(values)
        for (row, fields, _), values in zip(self._exact, arrays.get("exact", ()), strict=True):
            self._doubts.note(row, values, fields, is_exact=True)
            found.setdefault(row, []).append(values)
        results = {dtype: iter(array.tolist()) for dtype, array in arrays.items() if isinstance(dtype, torch.dtype)}
        for row, n, fields, reductions in self._reduced:
            values = operators.decode([next(results[x.dtype]) for x in reductions], n, fields)
            self._doubts.note(row, values, fields, is_exact=False)
            found.setdefault(row, []).append(values)
        with np.errstate(all="ignore"):
            merged = [merge_rows(np.stack(parts)) if len(parts) > 1 else parts[0] for parts in found.values()]
        return list(found), np.stack(merged) if merged else np.empty((0, len(EMPTY)))


class DeviceStatistics:
    """A row of statistics for each number that a caller gives, and histograms beside it, on one device.

    `HostStatistics` has the same methods.  Only `record` waits for the device.

    Parameters
    ----------
    device : torch.device
        The device of the tensors.
    doubts : Doubts, optional
        Which rows are measured in float64.

    Attributes
    ----------
    codes : dict
        Histograms by row and field.

    Examples
    --------
    >>> from ikkuna.numerics.statistics import closure
    >>> statistics, fields = DeviceStatistics(torch.device("cpu")), closure(["m2", "max"])
    >>> for x in (torch.tensor([1.0, 2.0]), torch.tensor([6.0])):
    ...     added = statistics.add(0, x, fields)
    >>> record = statistics.record(0, fields)
    >>> record.mean, record.variance(), record.max
    (3.0, 4.666666666666667, 6.0)
    """

    def __init__(self, device: torch.device, doubts: Doubts | None = None) -> None:
        self.device = device
        self.codes: dict[int, dict[str, Tensor]] = {}
        self._doubts = Doubts() if doubts is None else doubts
        self._kernels = triton_kernels(device)
        self._counts = CodeCounts(device)
        self._exact: list[tuple[int, frozenset[str], Tensor]] = []
        self._reduced: list[ReducedTensor] = []
        self._written: list[Written] = []
        self._settled: list[Taken] = []
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._streams: list[Any] = []

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
        self._note_stream()
        repeated = x
        x, times = without_repeats(x)
        weight = weight * times
        is_weighted = isinstance(weight, Tensor) or weight != 1
        if x.numel() and not is_weighted and self._write(row, x, fields, generator):
            return True
        if not x.numel():
            pass
        elif _overlaps(x):
            for part in pieces(x, _PIECE):
                self._add_exactly(row, part, fields, weight if is_weighted else 1)
        elif operators.accepts(x, fields) and not is_weighted and row not in self._doubts:
            for part in operators.split(x, fields):
                self._reduced.append(ReducedTensor(row, part.numel(), fields, operators.reduce(part, fields)))
        else:
            self._add_exactly(row, x, fields, weight if is_weighted else 1)
        if not fields.isdisjoint(HISTOGRAMS):
            add_codes(self.codes.setdefault(row, {}), repeated, fields, generator)
        return True

    def _note_stream(self) -> None:
        """Remember on which stream the results are computed."""
        if (stream := self._stream()) is not None and stream not in self._streams:
            self._streams.append(stream)

    def _stream(self) -> Any:
        return self._module.current_stream() if hasattr(self._module, "current_stream") else None

    def _wait_for_streams(self) -> None:
        """Let the kernels that follow wait for all results, without waiting on the host."""
        for stream in self._streams:
            if stream != (current := self._module.current_stream()):
                current.wait_stream(stream)

    def _write(self, row: int, x: Tensor, fields: frozenset[str], generator: torch.Generator | None) -> bool:
        """Measure a tensor with Triton kernels, if there is one for it."""
        if (kernels := self._kernels) is None or not kernels.accepts_one(x, fields):
            return False
        n = x.numel()
        if names := _counted(n, fields):
            counts = self._counts.of(CountOwner(row, names), n, histograms_of(n), self._stream())
        if names or not fields <= HISTOGRAMS | {"n"}:
            written = kernels.measure(row, x, fields, counts[: histograms_of(n)] if names else None)
            if written is None:
                return False
            self._written.append(written)
        else:
            self._reduced.append(ReducedTensor(row, n, _NUMBER, []))
        if _is_sampled(n, fields):
            counts = self._counts.reserve([_sampled(row, n)], self._stream())
            if not kernels.sample(x, counts, draw_seed(generator)):
                add_codes(self.codes.setdefault(row, {}), x, _SAMPLED, generator)
        self._settle_counts()
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
        self._note_stream()
        left = self._write_all(rows, TensorList(tensors, copies, copies=True), fields, generator)
        wanted = [(copy, tensors[i]) for i in left if copies and (copy := copies[i]) is not None]
        if wanted:
            torch._foreach_copy_([copy for copy, _ in wanted], [x for _, x in wanted])
        together = [
            (rows[i], tensors[i])
            for i in left
            if operators.accepts_list(tensors[i], fields) and rows[i] not in self._doubts and tensors[i].numel()
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
        self._note_stream()
        if not (left := self._write_all(rows, TensorList(xs, ys), fields, generator)):
            return
        rows, xs, ys = [rows[i] for i in left], [xs[i] for i in left], [ys[i] for i in left]
        if xs[0].dtype.itemsize < 4:
            for row, x, y in zip(rows, xs, ys, strict=True):
                self.add(row, x.float().sub_(y), fields, generator=generator)
            return
        torch._foreach_sub_(ys, xs)
        torch._foreach_neg_(ys)
        self.add_all(rows, ys, fields, generator)

    def _write_all(
        self, rows: Sequence[int], tensors: TensorList, fields: frozenset[str], generator: torch.Generator | None
    ) -> list[int]:
        """Measure several tensors with one Triton kernel, and with another one for samples; return the numbers of those left."""
        left = list(range(len(rows)))
        chosen = [i for i in left if self._is_written(i, tensors, fields)]
        if not chosen or (kernels := self._kernels) is None:
            return left
        rows, xs = [rows[i] for i in chosen], [tensors.xs[i] for i in chosen]
        others = [tensors.others[i] for i in chosen] if tensors.others else []
        most = _most_counted(fields)
        owners = [
            CountOwner(row, _counted(n, fields))
            for row, n in zip(rows, (x.numel() for x in xs), strict=True)
            if n <= most
            for _ in range(histograms_of(n, in_list=True))
        ]
        counts = self._counts.reserve(owners, self._stream()) if owners else None
        part = TensorList(xs, others, tensors.copies, counts, most)
        if (written := kernels.measure_list(rows, part, fields)) is None:
            return left
        self._written.append(written)
        self._sample_all(kernels, rows, part, fields, generator)
        self._settle_counts()
        return [i for i in left if i not in set(chosen)] if len(chosen) < len(left) else []

    def _is_written(self, i: int, tensors: TensorList, fields: frozenset[str]) -> bool:
        """Return whether a Triton kernel can measure a tensor of a list."""
        if (kernels := self._kernels) is None or not kernels.accepts(x := tensors.xs[i], fields):
            return False
        y = tensors.others[i] if tensors.others else None
        if y is None:
            return True
        are_alike = x.stride() == y.stride() and x.dtype == y.dtype
        return are_alike and kernels.accepts_one(x, fields) and kernels.accepts_one(y, fields)

    def _sample_all(
        self,
        kernels: TritonKernels,
        rows: Sequence[int],
        tensors: TensorList,
        fields: frozenset[str],
        generator: torch.Generator | None,
    ) -> None:
        """Count samples of the large tensors of a list."""
        drawn = [i for i, x in enumerate(tensors.xs) if _is_sampled(x.numel(), fields)]
        if not drawn:
            return
        counts = self._counts.reserve([_sampled(rows[i], tensors.xs[i].numel()) for i in drawn], self._stream())
        if kernels.sample_list(tensors, drawn, counts, draw_seed(generator)):
            return
        for i in drawn:
            y = None if tensors.copies or not tensors.others else tensors.others[i]
            x = tensors.xs[i] if y is None else tensors.xs[i].float() - y
            add_codes(self.codes.setdefault(rows[i], {}), x, _SAMPLED, generator)

    def _settle_counts(self) -> None:
        """Merge the histograms of samples, of which each call has its own, before they need much memory."""
        if len(self._counts) > _MOST_COUNTS and self._kernels is not None:
            self._wait_for_streams()
            taken = Taken([], [], self._doubts, (), self._kernels, self._counts.take())
            self._settled.append(taken)  # its memory may belong to other streams
            merge_codes(self.codes, taken.codes(taken.tensors))

    def _add_exactly(self, row: int, x: Tensor, fields: frozenset[str], weight: float | Tensor) -> None:
        read = readable(x)
        assert read is not None, "has_numbers() has seen numbers"
        stored, implied_zeros = flatten(read[0]), read[1]
        rows = [measure_exactly(stored, fields)] if stored.numel() else []
        if implied_zeros:
            rows.append(torch.from_numpy(row_of(0.0, implied_zeros)).to(x.device, non_blocking=True))
        if isinstance(weight, Tensor) or weight != 1:
            rows = [repeat_rows(values, weight) for values in rows]
        self._exact += ((row, fields, values) for values in rows)
        if len(self._exact) > _MOST_EXACT:
            self._exact = _merged(self._exact)

    def add_difference(self, row: int, x: Tensor, y: Tensor, fields: frozenset[str]) -> bool:
        """Add the statistics of ``x - y``, computed in at least float32, to a row; return whether these tensors have numbers."""
        return self.add(row, x.to(torch.promote_types(x.dtype, torch.float32)) - y, fields)

    def record(self, row: int, fields: frozenset[str]) -> Record:
        """Return the `fields` of a row; this waits for the device."""
        exact = [found for found in self._exact if found[0] == row]
        reduced = [found for found in self._reduced if found.row == row]
        written = [
            Written((row,) * sum(mine), rows.values[torch.tensor(mine, device="cpu").to(rows.values.device)])
            for rows in self._written
            if any(mine := [owner == row for owner in rows.owners])
        ]
        taken = Taken(exact, reduced, self._doubts, written, self._kernels, self._counts.used())
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
        self._exact += other._exact
        self._streams += (stream for stream in other._streams if stream not in self._streams)
        self._written += other._written
        self._counts.merge(other._counts)
        self._settled += other._settled
        self._reduced += other._reduced
        merge_codes(self.codes, other.codes)

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Empty some rows, or all."""
        if rows is None:
            self._exact, self._reduced, self._written, self._settled, self.codes = [], [], [], [], {}
            self._counts.take()
            return
        dropped = set(rows)
        self._exact = [found for found in self._exact if found[0] not in dropped]
        self._reduced = [found for found in self._reduced if found.row not in dropped]
        self._written = [
            Written(tuple(_DROPPED if owner in dropped else owner for owner in rows.owners), rows.values)
            for rows in self._written
        ]
        self._counts.drop(dropped)
        for row in dropped:
            self.codes.pop(row, None)

    def take(self) -> tuple[Taken, dict[int, dict[str, Tensor]]]:
        """Return everything that was measured, and the histograms; empty all rows."""
        self._wait_for_streams()
        self._streams = []
        counted, codes = self._counts.take(), self.codes
        taken = Taken(self._exact, self._reduced, self._doubts, self._written, self._kernels, counted)
        taken.keep(self._settled)
        self._exact, self._reduced, self._written, self._settled, self.codes = [], [], [], [], {}
        return taken, codes


def _merged(exact: Sequence[tuple[int, frozenset[str], Tensor]]) -> list[tuple[int, frozenset[str], Tensor]]:
    """Merge the values of each row and set of fields, in one operation for all that have equally many."""
    by_row: dict[tuple[int, frozenset[str]], list[Tensor]] = {}
    for row, fields, value in exact:
        by_row.setdefault((row, fields), []).append(value)
    by_count: dict[int, list[tuple[int, frozenset[str]]]] = {}
    for key, values in by_row.items():
        by_count.setdefault(len(values), []).append(key)
    found = []
    for count, keys in by_count.items():
        stacked = torch.stack([values for key in keys for values in by_row[key]])
        rows = merge_rows(stacked.unflatten(0, (len(keys), count)).transpose(0, 1)) if count > 1 else stacked
        found += [(*key, values) for key, values in zip(keys, islice(rows, len(keys)), strict=True)]
    return found


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


def _overlaps(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, so that a copy of it would be larger than its storage."""
    is_plain = type(x) is Tensor and x.layout is torch.strided
    return is_plain and x.numel() * x.element_size() > x.untyped_storage().nbytes()
