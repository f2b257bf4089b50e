"""Rows and histograms that Triton kernels write."""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.statistics.device.buffers import CodeCounts, CountBuffer, CountOwner, KernelRows, RowBuffers
from ikkuna.numerics.statistics.device.operators import DROPPED
from ikkuna.numerics.statistics.device.triton_launcher import TensorList, TritonKernels, histograms_of
from ikkuna.numerics.statistics.float_code import SAMPLE, WORTH_SAMPLING, draw_seed
from ikkuna.numerics.statistics.record import HISTOGRAMS

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
    written : list of KernelRows
        The rows.
    sizes : list of (int, int)
        Row and number of elements of tensors of which only samples are counted.
    """

    def __init__(self, kernels: TritonKernels, counts: CodeCounts) -> None:
        self.kernels, self.counts = kernels, counts
        self._buffers = RowBuffers(kernels.device)
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
            written = self.kernels.measure(row, x, fields, counted, partial(self._buffers.reserve, stream=stream))
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

    def add_plain(self, row: int, x: Tensor, fields: frozenset[str], stream: Any) -> bool:
        """Measure a tensor that the kernels take, without histograms; return whether the launch succeeds."""
        written = self.kernels.measure(row, x, fields, None, partial(self._buffers.reserve, stream=stream))
        if written is None:
            return False
        self.written.append(written)
        return True

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
            written := self.kernels.measure_list(rows, part, fields, partial(self._buffers.reserve, stream=stream))
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
            KernelRows(tuple(DROPPED if owner in rows else owner for owner in written.owners), written.values)
            for written in self.written
        ]
        self.sizes = [entry for entry in self.sizes if entry[0] not in rows]
        self.counts.drop(rows)

    def take(self) -> tuple[list[KernelRows], list[CountBuffer], list[tuple[int, int]]]:
        """Return the rows, the histograms and the sizes, and forget them."""
        taken = self.written, self.counts.take(), self.sizes
        self._buffers.take()
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
