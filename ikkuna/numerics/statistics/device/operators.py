"""Statistics of tensors on a device with torch's reductions in float32.

Norm, moments, zeros and extrema take at most one launch each.

A reduction returns a 0-d tensor, and nothing of the tensor's size is allocated, with two exceptions: the moments of half precision,
which `torch.var_mean` would round to half precision, and exact counts of elements that are not finite.
Data that need float64 are recognised on the host, see `ImpreciseRows`.
`DeviceRows` holds the measurements of a step on their way to the host.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.statistics.device.buffers import CountBuffer, ImpreciseRows, KernelRows
from ikkuna.numerics.statistics.device.exact import ExactRow
from ikkuna.numerics.statistics.device.triton_launcher import TritonKernels
from ikkuna.numerics.statistics.float_code import merge_codes
from ikkuna.numerics.statistics.record import EXACT_COUNTS
from ikkuna.numerics.statistics.table import COLUMN, EMPTY, Values, merge_rows

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
_HIGHER = frozenset(("m3", "m4"))
_MOMENTS = frozenset(("mean", "m2"))
_EXTREMA = frozenset(("min", "max", "finite_min", "finite_max"))
_SCREENING = _MOMENTS | _EXTREMA | {"l1", EXACT_COUNTS}  # what shows whether all elements are finite
_LISTED = frozenset(("n", "nans", "infs", "sumsq", "l1"))
_CHUNK = 1 << 24  # elements that float32 can count; as many in float32 take 64 MiB


def accepts(x: Tensor, fields: frozenset[str]) -> bool:
    """Return whether `reduce` can compute the `fields` of `x`."""
    return x.dtype in _DTYPES and x.layout is torch.strided and fields.isdisjoint(_HIGHER) and not x.is_nested


def accepts_list(x: Tensor, fields: frozenset[str]) -> bool:
    """Return whether `reduce_list` can compute the `fields` of `x`."""
    return accepts(x, fields) and fields <= _LISTED


def reduce_list(tensors: list[Tensor], fields: frozenset[str]) -> list[list[Tensor]]:
    """Return what `reduce` returns of each of several tensors of one dtype, with few launches for all."""
    columns = []
    if _takes_norm(fields):
        columns.append(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    if "l1" in fields:
        columns.append(torch._foreach_norm(tensors, 1, dtype=torch.float32))
    return [list(found) for found in zip(*columns, strict=True)]


def split(x: Tensor, fields: frozenset[str]) -> Sequence[Tensor]:
    """Return the parts of `x` that are reduced separately."""
    must_be_short = not fields.isdisjoint(("zeros", EXACT_COUNTS)) or (
        x.dtype is not torch.float32 and not fields.isdisjoint(_MOMENTS)
    )
    return x.reshape(-1).split(_CHUNK) if must_be_short and x.numel() > _CHUNK else (x,)


def reduce(x: Tensor, fields: frozenset[str]) -> list[Tensor]:
    """Return the reductions of `x` that `decode` makes a row of: 0-d tensors on its device, extrema in its dtype."""
    found: list[Tensor] = []
    if _takes_norm(fields):
        found.append(_norm(x, 2))
    if "l1" in fields:
        found.append(_norm(x, 1))
    if "zeros" in fields:
        found.append(_norm(x, 0))
    if EXACT_COUNTS in fields:
        found += ((x != x).sum(dtype=torch.float32), _norm(x - x, 0))  # NaN, and NaN or Inf
    if not fields.isdisjoint(_MOMENTS):
        found += torch.var_mean(x.float(), correction=0)
    if not fields.isdisjoint(_EXTREMA):
        found += torch.aminmax(x)
    return found


def decode(values: Sequence[float], n: int, fields: frozenset[str]) -> Values:
    """Return the row of `n` elements with these reductions.

    If one of them is not finite and there are no exact counts, one element counts as NaN or infinite.
    How many there are is measured from the next step on.

    Examples
    --------
    >>> fields = frozenset(("n", "nans", "infs", "sumsq", "zeros"))
    >>> row = decode([x.item() for x in reduce(torch.tensor([3.0, 0.0, -4.0]), fields)], 3, fields)
    >>> row[COLUMN["sumsq"]].item(), row[COLUMN["zeros"]].item()
    (25.0, 1.0)
    """
    row, found = EMPTY.copy(), iter(values)
    row[0] = n
    checked = 0.0
    if _takes_norm(fields):
        norm = next(found)
        checked += norm
        row[COLUMN["sumsq"]] = norm * norm
    if "l1" in fields:
        row[COLUMN["l1"]] = next(found)
        checked += row[COLUMN["l1"]]
    if "zeros" in fields:
        row[COLUMN["zeros"]] = n - next(found)
    if EXACT_COUNTS in fields:
        nans, nonfinite = next(found), next(found)
        row[COLUMN["nans"]], row[COLUMN["infs"]] = nans, nonfinite - nans
    if not fields.isdisjoint(_MOMENTS):
        variance, mean = next(found), next(found)
        checked += variance
        row[COLUMN["mean"]], row[COLUMN["m2"]] = mean, variance * n
    if not fields.isdisjoint(_EXTREMA):
        low, high = next(found), next(found)
        row[COLUMN["min"]], row[COLUMN["max"]] = low, high
        checked += low + high
        if math.isfinite(low + high):
            row[COLUMN["finite_min"]], row[COLUMN["finite_max"]] = low, high
    if not math.isfinite(checked) and EXACT_COUNTS not in fields:
        row[COLUMN["nans" if math.isnan(checked) else "infs"]] = 1
    return row


def _norm(x: Tensor, order: int) -> Tensor:
    """Return a norm in float32; accelerators add in a tree, so that it is right to about 1e-7 for any number of elements."""
    norm: Tensor = torch.linalg.vector_norm(x, order, dtype=torch.float32)
    return norm


def _takes_norm(fields: frozenset[str]) -> bool:
    """Return whether the norm is needed, if only to see that all elements are finite."""
    if "sumsq" in fields:
        return True
    return "nans" in fields and fields.isdisjoint(_SCREENING)


DROPPED = -1
"""The owner of written rows that were cleared."""


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


class DeviceRows:
    """Measurements of a step on a device.

    Parameters
    ----------
    exact : list of ExactRow
        Rows that were measured precisely.
    reduced : list of ReducedTensor
        Rows measured in float32.
    imprecise : ImpreciseRows
        Learns which rows float32 is not enough for.
    written : list of KernelRows
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
        exact: list[ExactRow],
        reduced: list[ReducedTensor],
        imprecise: ImpreciseRows,
        written: Sequence[KernelRows] = (),
        kernels: TritonKernels | None = None,
        counted: Sequence[CountBuffer] = (),
    ) -> None:
        self._exact, self._reduced, self._imprecise = exact, reduced, imprecise
        self._merged: tuple[int, ...] = ()
        self._counts: tuple[tuple[int, tuple[str, ...]], ...] = ()
        self.tensors: dict[Any, Tensor] = {}
        if written and kernels is not None:
            self._merged, self.tensors["merged"] = kernels.merge(written)
        if counted and kernels is not None:
            self._counts, self.tensors["counts"] = kernels.merge_counts(counted)
        self.numbers = {*(found.row for found in exact), *(measured.row for measured in reduced), *self._merged} - {
            DROPPED
        }
        if exact:
            self.tensors["exact"] = torch.stack([found.values for found in exact])
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
            if row != DROPPED:
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
            if row != DROPPED:
                found.setdefault(row, []).append(values)
        for exact, numbers in zip(self._exact, arrays.get("exact", ()), strict=True):
            values = exact.decode(numbers)
            self._imprecise.note(exact.row, values, exact.fields, is_exact=True)
            found.setdefault(exact.row, []).append(values)
        results = {dtype: iter(array.tolist()) for dtype, array in arrays.items() if isinstance(dtype, torch.dtype)}
        for row, n, fields, reductions in self._reduced:
            values = decode([next(results[x.dtype]) for x in reductions], n, fields)
            self._imprecise.note(row, values, fields, is_exact=False)
            found.setdefault(row, []).append(values)
        with np.errstate(all="ignore"):
            merged = [merge_rows(np.stack(parts)) if len(parts) > 1 else parts[0] for parts in found.values()]
        return list(found), np.stack(merged) if merged else np.empty((0, len(EMPTY)))
