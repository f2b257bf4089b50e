"""Quantiles and buckets of the float codes of several tensors in one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ikkuna.numerics.statistics.float_code import bin_edges, half_size
from ikkuna.numerics.statistics.records import Records

__all__ = ["Buckets", "Histograms"]

_Floats = NDArray[np.float64]
_Indices = NDArray[np.intp]
_BLOCK = 64  # sets: arrays of 2 MiB, which stay in a cache


@dataclass(frozen=True)
class Buckets:
    """A histogram as TensorBoard stores it.

    Parameters
    ----------
    min, max : float
        Extrema.
    num : int
        Number of elements.
    sum, sum_squares : float
        Sums of the elements and of their squares.
    bucket_limits : list of float
        Right edges.
    bucket_counts : list of float
        Numbers of elements, possibly fractions.
    """

    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[float]


class Histograms:
    """The histograms of several sets of numbers by their float codes.

    Parameters
    ----------
    counts : sequence of array of int64
        ``(2K,)`` of each set, as :func:`~ikkuna.numerics.statistics.float_code.codes` returns it.
    min, max : array
        ``(sets,)``, the extrema of the finite elements, which make the outermost bins exact; not finite where they are not known.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.float_code import codes
    >>> x = torch.arange(5.0)
    >>> histograms = Histograms([codes(x).numpy(), codes(-x).numpy()], np.array([0.0, -4.0]), np.array([4.0, 0.0]))
    >>> histograms.quantile([0.0, 1.0]).tolist()
    [[0.0, -4.0], [4.0, 0.0]]
    """

    def __init__(self, counts: Sequence[NDArray[np.int64]], min: _Floats, max: _Floats) -> None:
        self._counts, self._min, self._max = counts, min, max

    @classmethod
    def of_records(cls, records: Records, exact: bool = False) -> "Histograms":
        """Return the histograms of records with ``codes`` if `exact`, otherwise of those with ``sampled_codes``."""
        return cls(records.codes if exact else records.sampled_codes, records.finite_min, records.finite_max)

    def _blocks(self) -> "Iterator[_Block]":
        for first in range(0, len(self._counts), _BLOCK):
            part = slice(first, first + _BLOCK)
            yield _Block(np.stack(self._counts[part]), self._min[part], self._max[part])

    def quantile(self, q: Sequence[float], finite_only: bool = False) -> _Floats:
        """Return the quantiles ``(quantiles, sets)``, see `Histogram.quantile`."""
        return np.concatenate([block.quantiles(q, finite_only) for block in self._blocks()]).T

    def tensorboard_buckets(self, n: int = 30) -> list[Buckets]:
        """Return the buckets of each set, see `Histogram.tensorboard_buckets`."""
        return [buckets for block in self._blocks() for buckets in block.tensorboard_buckets(n)]


class _Block:
    """Some of the histograms, with their counts in one array ``(sets, 2K)``."""

    def __init__(self, counts: NDArray[np.int64], min: _Floats, max: _Floats) -> None:
        self.counts = counts
        m = counts.shape[1].bit_length() - 10
        self._half, self._infinite = half_size(m), 255 << m
        self._low, self._high = _bin_bounds(m)
        self._least = np.where(np.isfinite(min), min, -np.inf)[:, None]
        self._most = np.where(np.isfinite(max), max, np.inf)[:, None]

    def quantiles(self, q: Sequence[float], finite_only: bool) -> _Floats:
        """Return the quantiles ``(sets, quantiles)``."""
        held = _Ranks(self._part(finite_only))
        rank = (held.total - 1)[:, None] * np.asarray(q, np.float64)
        below, above = (self._order_statistics(held, which, finite_only) for which in (np.floor(rank), np.ceil(rank)))
        with np.errstate(invalid="ignore"):  # NaN between an infinity and its neighbour, as in numpy
            found: _Floats = below + np.where(above == below, 0.0, (above - below) * (rank - np.floor(rank)))
        found[held.total == 0] = np.nan
        if not finite_only:
            found[self._has_nans()] = np.nan
        return found

    def _part(self, finite_only: bool) -> NDArray[np.int64]:
        """Return the bins of all elements or those of the finite ones."""
        end = self._infinite if finite_only else self._half
        return self.counts[:, self._half - end : self._half + end]

    def _has_nans(self) -> NDArray[np.bool_]:
        first = self._infinite + 1
        beyond = self.counts[:, : self._half - first], self.counts[:, self._half + first :]
        found: NDArray[np.bool_] = sum(part.sum(axis=1) for part in beyond) > 0
        return found

    def _order_statistics(self, held: "_Ranks", rank: _Floats, finite_only: bool) -> _Floats:
        """Return the numbers at these ranks ``(sets, ranks)``; the elements of a bin are spread evenly over it."""
        bin_, within, count = held.find(rank)
        low, high = self._bounds(bin_ + (self._half - self._infinite if finite_only else 0))
        with np.errstate(invalid="ignore", divide="ignore"):
            value: _Floats = np.where(low == high, low, low + (within + 0.5) / count * (high - low))
        for known, end in ((self._least, 0), (self._most, held.total[:, None] - 1)):
            known_here = np.isfinite(known) & (rank == end) & np.isfinite(value)
            value = np.where(known_here, known, value)
        return value

    def _bounds(self, bin_: _Indices) -> tuple[_Floats, _Floats]:
        """Return the smallest and the largest number that each of these bins ``(sets, bins)`` can hold."""
        shape = np.broadcast_shapes(bin_.shape, self._least.shape)
        low, high = (np.broadcast_to(bound[bin_], shape).copy() for bound in (self._low, self._high))
        is_finite = np.isfinite(low) & np.isfinite(high)
        for bound in (low, high):
            np.copyto(bound, np.minimum(np.maximum(bound, self._least), self._most), where=is_finite)
        return low, high

    def tensorboard_buckets(self, n: int) -> list[Buckets]:
        """Return the finite elements of each set in buckets."""
        held = _Ranks(self._part(finite_only=True))
        first = self._half - self._infinite
        outermost = held.find(np.stack([np.zeros(len(held.total)), held.total - 1.0], axis=1))[0] + first
        low, high = self._bounds(outermost)
        least = np.where(np.isfinite(self._least), self._least, low[:, :1])
        most = np.where(np.isfinite(self._most), self._most, high[:, 1:])
        limits = least + _fractions(n) * (most - least)
        limits[:, -1:] = most
        shares = np.diff(self._counted_up_to(limits, held), axis=1, prepend=0.0)
        sums, squares = self._sums(held)
        found = []
        for i, total in enumerate(held.total.tolist()):
            if not total:
                found.append(Buckets(np.nan, np.nan, 0, 0.0, 0.0, [], []))
                continue
            edges, counts = limits[i].tolist(), shares[i].tolist()
            if not most[i] > least[i]:
                edges, counts = edges[-1:], [float(total)]
            found.append(
                Buckets(float(least[i, 0]), edges[-1], total, float(sums[i]), float(squares[i]), edges, counts)
            )
        return found

    def _counted_up_to(self, limits: _Floats, held: "_Ranks") -> _Floats:
        """Return the number of finite elements up to each limit ``(sets, limits)``; bins of a single number are steps."""
        first = self._half - self._infinite
        part = self._low[first : self._half + self._infinite]
        bin_ = part.searchsorted(limits, side="right") - 1
        low, high = self._bounds(bin_ + first)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(high > low, np.clip((limits - low) / (high - low), 0.0, 1.0), 1.0)
        count, before = held.counts_of(bin_)
        return before + share * count

    def _sums(self, held: "_Ranks") -> tuple[_Floats, _Floats]:
        """Return the sums of the finite elements and of their squares, all in the middle of their bins."""
        first = self._half - self._infinite
        low, high = self._bounds(np.arange(first, self._half + self._infinite)[None])
        middle = (low + high) / 2
        weighted = held.counts * middle
        return weighted.sum(axis=1), np.einsum("ij,ij->i", weighted, middle)


class _Ranks:
    """Finds the elements of several sets by their rank.

    Parameters
    ----------
    counts : array of int64
        ``(sets, bins)``.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self.counts = counts
        self._upto = counts.cumsum()  # over all sets, so that one search finds the ranks of all
        self._width = counts.shape[1]
        ends = self._upto[self._width - 1 :: self._width]
        self._before = np.concatenate([[0], ends[:-1]])[:, None]
        self.total: NDArray[np.int64] = ends - self._before[:, 0]

    def find(self, rank: _Floats) -> tuple[_Indices, _Floats, NDArray[np.int64]]:
        """Return the bins of these ranks ``(sets, ranks)``, the ranks within the bins, and the counts of the bins.

        A set without elements gives any bin.
        """
        found = self._upto.searchsorted(self._before + rank, side="right").clip(max=self._upto.size - 1)
        count = (
            self.counts.ravel()[found] if self.counts.flags.c_contiguous else self.counts[np.divmod(found, self._width)]
        )
        within = rank - (self._upto[found] - count - self._before)
        return found % self._width, within, count

    def counts_of(self, bin_: _Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the counts of these bins ``(sets, bins)``, and of all bins of the set before each."""
        count = np.take_along_axis(self.counts, bin_, axis=1)
        upto = self._upto[bin_ + self._width * np.arange(len(bin_))[:, None]]
        return count, upto - count - self._before


@cache
def _bin_bounds(m: int) -> tuple[_Floats, _Floats]:
    """Return the smallest and the largest number that each bin can hold; magnitudes of the innermost bins count as 0."""
    edges, half, infinite = bin_edges(m), half_size(m), 255 << m
    low, high = edges[:-1].copy(), edges[1:].copy()
    low[half - 1 : half + 1] = high[half - 1 : half + 1] = 0.0
    low[half + infinite], high[half - 1 - infinite] = np.inf, -np.inf
    return low, high


@cache
def _fractions(n: int) -> _Floats:
    return np.arange(1, n + 1) / n
