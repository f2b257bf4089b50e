"""Rows of statistics of tensors on a device, computed there without waiting for it."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import flatten, has_numbers, pieces, readable, without_repeats
from ikkuna.numerics.statistics.device import operators
from ikkuna.numerics.statistics.device.doubts import Doubts
from ikkuna.numerics.statistics.device.exact import measure_exactly
from ikkuna.numerics.statistics.device.triton_launcher import TritonKernels, Written, triton_kernels
from ikkuna.numerics.statistics.float_code import add_codes, merge_codes
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, record_of
from ikkuna.numerics.statistics.table import EMPTY, Values, merge_rows, repeat_rows, row_of

__all__ = ["DeviceStatistics", "ReducedTensor", "Taken"]

_DROPPED = -1  # the owner of written rows that were cleared
_PIECE = 1 << 18  # elements of a tensor that is read in parts
_MOST_EXACT = 256  # rows of float64 that wait to be merged


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
    """What a step has measured on a device.

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

    Attributes
    ----------
    tensors : dict
        The tensors to copy to the host.
    numbers : set of int
        The rows that were measured.
    """

    def __init__(
        self,
        exact: list[Any],
        reduced: list[ReducedTensor],
        doubts: Doubts,
        written: Sequence[Written] = (),
        kernels: TritonKernels | None = None,
    ) -> None:
        self._exact, self._reduced, self._doubts = exact, reduced, doubts
        self._merged: tuple[int, ...] = ()
        self.tensors: dict[Any, Tensor] = {}
        if written and kernels is not None:
            self._merged, self.tensors["merged"] = kernels.merge(written)
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
        self._written = written  # kept until the copy has arrived: their memory may belong to other streams

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
        self._exact: list[tuple[int, frozenset[str], Tensor]] = []
        self._reduced: list[ReducedTensor] = []
        self._written: list[Written] = []
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
        if not x.numel() or (not is_weighted and self._write(row, x, fields)):
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
        if hasattr(self._module, "current_stream") and (stream := self._module.current_stream()) not in self._streams:
            self._streams.append(stream)

    def _wait_for_streams(self) -> None:
        """Let the kernels that follow wait for all results, without waiting on the host."""
        for stream in self._streams:
            if stream != (current := self._module.current_stream()):
                current.wait_stream(stream)

    def _write(self, row: int, x: Tensor, fields: frozenset[str]) -> bool:
        """Measure a tensor with a Triton kernel, if there is one for it."""
        if self._kernels is None or not self._kernels.accepts(x, fields):
            return False
        written = self._kernels.measure(row, x, fields)
        if written is not None:
            self._written.append(written)
        return written is not None

    def add_all(self, rows: Sequence[int], tensors: Sequence[Tensor], fields: frozenset[str]) -> None:
        """Add the statistics of several tensors of one dtype, each to its row; norms of all take few launches."""
        self._note_stream()
        if self._write_all(rows, tensors, fields):
            return
        together = [
            (row, x)
            for row, x in zip(rows, tensors, strict=True)
            if operators.accepts_list(x, fields) and row not in self._doubts and x.numel()
        ]
        if together:
            results = operators.reduce_list([x for _, x in together], fields)
            for (row, x), found in zip(together, results, strict=True):
                self._reduced.append(ReducedTensor(row, x.numel(), fields, found))
        done = {row for row, _ in together}
        for row, x in zip(rows, tensors, strict=True):
            if row not in done:
                self.add(row, x, fields)

    def add_differences(self, rows: Sequence[int], xs: list[Tensor], ys: list[Tensor], fields: frozenset[str]) -> None:
        """Add the statistics of ``x - y`` of several pairs of one dtype, float32 or float64; `ys` may be overwritten."""
        self._note_stream()
        if not self._write_all(rows, xs, fields, ys):
            torch._foreach_sub_(ys, xs)
            torch._foreach_neg_(ys)
            self.add_all(rows, ys, fields)

    def _write_all(
        self, rows: Sequence[int], xs: Sequence[Tensor], fields: frozenset[str], minus: Sequence[Tensor] = ()
    ) -> bool:
        """Measure several tensors with one Triton kernel, if it accepts all of them."""
        kernels = self._kernels
        if kernels is None or not all(kernels.accepts(x, fields) for x in (*xs, *minus)):
            return False
        if any(x.stride() != y.stride() for x, y in zip(xs, minus, strict=False)):
            return False
        written = kernels.measure_list(rows, xs, fields, minus)
        if written is not None:
            self._written.append(written)
        return written is not None

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
        taken = Taken(exact, reduced, self._doubts, written, self._kernels)
        _, values = taken.rows({name: tensor.cpu().double().numpy() for name, tensor in taken.tensors.items()})
        record = record_of(values[0] if len(values) else EMPTY, fields)
        for name, counts in self.codes.get(row, {}).items():
            setattr(record, name, counts.cpu().numpy())
        return record

    def merge(self, other: "DeviceStatistics") -> None:
        """Add the rows of `other`, and leave it as it is."""
        self._exact += other._exact
        self._streams += (stream for stream in other._streams if stream not in self._streams)
        self._written += other._written
        self._reduced += other._reduced
        merge_codes(self.codes, other.codes)

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Empty some rows, or all."""
        if rows is None:
            self._exact, self._reduced, self._written, self.codes = [], [], [], {}
            return
        dropped = set(rows)
        self._exact = [found for found in self._exact if found[0] not in dropped]
        self._reduced = [found for found in self._reduced if found.row not in dropped]
        self._written = [
            Written(tuple(_DROPPED if owner in dropped else owner for owner in rows.owners), rows.values)
            for rows in self._written
        ]
        for row in dropped:
            self.codes.pop(row, None)

    def take(self) -> tuple[Taken, dict[int, dict[str, Tensor]]]:
        """Return everything that was measured, and the histograms; empty all rows."""
        self._wait_for_streams()
        self._streams = []
        taken, codes = Taken(self._exact, self._reduced, self._doubts, self._written, self._kernels), self.codes
        self._exact, self._reduced, self._written, self.codes = [], [], [], {}
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


def _overlaps(x: Tensor) -> bool:
    """Return whether elements of a tensor share memory, so that a copy of it would be larger than its storage."""
    is_plain = type(x) is Tensor and x.layout is torch.strided
    return is_plain and x.numel() * x.element_size() > x.untyped_storage().nbytes()
