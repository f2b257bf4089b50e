"""The measurements of a step on a device, on their way to the host."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.statistics.device import operators
from ikkuna.numerics.statistics.device.code_counts import CountBuffer
from ikkuna.numerics.statistics.device.doubts import Doubts
from ikkuna.numerics.statistics.device.exact_rows import ExactRow
from ikkuna.numerics.statistics.device.row_buffers import Written
from ikkuna.numerics.statistics.device.triton_launcher import TritonKernels
from ikkuna.numerics.statistics.float_code import merge_codes
from ikkuna.numerics.statistics.table import EMPTY, Values, merge_rows

__all__ = ["DROPPED", "ReducedTensor", "Taken"]

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


class Taken:
    """Measurements of a step on a device.

    Parameters
    ----------
    exact : list of ExactRow
        Rows that were measured precisely.
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
        exact: list[ExactRow],
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
            self._doubts.note(exact.row, values, exact.fields, is_exact=True)
            found.setdefault(exact.row, []).append(values)
        results = {dtype: iter(array.tolist()) for dtype, array in arrays.items() if isinstance(dtype, torch.dtype)}
        for row, n, fields, reductions in self._reduced:
            values = operators.decode([next(results[x.dtype]) for x in reductions], n, fields)
            self._doubts.note(row, values, fields, is_exact=False)
            found.setdefault(row, []).append(values)
        with np.errstate(all="ignore"):
            merged = [merge_rows(np.stack(parts)) if len(parts) > 1 else parts[0] for parts in found.values()]
        return list(found), np.stack(merged) if merged else np.empty((0, len(EMPTY)))
