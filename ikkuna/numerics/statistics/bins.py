"""The bins of several histograms by float codes, with the quantiles and buckets of each: in numpy, and native."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ikkuna.numerics.statistics.float_code import bin_edges, half_size
from ikkuna.numerics.statistics.native import Library

_Floats = NDArray[np.float64]
_Counts = NDArray[np.int64]
_Indices = NDArray[np.intp]


@cache
def bin_bounds(m: int) -> tuple[_Floats, _Floats]:
    """Return the smallest and the largest number that each bin can hold; magnitudes of the innermost bins count as 0."""
    edges, half, infinite = bin_edges(m), half_size(m), 255 << m
    low, high = edges[:-1].copy(), edges[1:].copy()
    low[half - 1 : half + 1] = high[half - 1 : half + 1] = 0.0
    low[half + infinite], high[half - 1 - infinite] = np.inf, -np.inf
    return low, high


class Bins:
    """The bins of some of the histograms that are not empty in all of them: a few hundred of thousands.

    Parameters
    ----------
    counts : array of int64
        ``(sets, 2K)``.
    bounds : (array, array)
        Those of :func:`bin_bounds`.
    min, max : array
        ``(sets,)``, see `Histograms`.
    finite_only : bool
        Whether the bins of infinite elements and NaN are left out.

    Attributes
    ----------
    totals : array of int64
        The number of elements of each set.
    """

    def __init__(
        self, counts: NDArray[np.int64], bounds: tuple[_Floats, _Floats], min: _Floats, max: _Floats, finite_only: bool
    ) -> None:
        m = counts.shape[1].bit_length() - 10
        half, infinite = half_size(m), 255 << m
        end = infinite if finite_only else half
        held = (counts[:, half - end : half + end] != 0).any(axis=0).nonzero()[0] + (half - end)
        if not len(held):
            held = np.array([half])
        is_nan = (held < half - 1 - infinite) | (held > half + infinite)
        self._low, self._high = (bound[held] for bound in bounds)
        self._least = np.where(np.isfinite(min), min, -np.inf)[:, None]
        self._most = np.where(np.isfinite(max), max, np.inf)[:, None]
        self._counts = counts[:, held]
        self._has_nans: NDArray[np.bool_] = (self._counts[:, is_nan] != 0).any(axis=1)
        self._offset = len(held) * np.arange(len(counts))[:, None]
        self._flat = self._counts.ravel()
        self._upto = self._flat.cumsum()  # over all sets, so that one search finds the ranks of all
        self._before = self._upto[self._offset] - self._flat[self._offset]
        self.totals: NDArray[np.int64] = self._counts.sum(axis=1)

    def quantiles(self, q: Sequence[float]) -> _Floats:
        """Return the quantiles ``(sets, quantiles)``."""
        rank = (self.totals - 1)[:, None] * np.asarray(q, np.float64)
        whole = np.floor(rank)
        with np.errstate(invalid="ignore", divide="ignore"):  # NaN between an infinity and its neighbour, as in numpy
            below, above = np.split(self._order_statistics(np.hstack([whole, np.ceil(rank)])), 2, axis=1)
            found: _Floats = below + np.where(above == below, 0.0, (above - below) * (rank - whole))
        found[self._has_nans | (self.totals == 0)] = np.nan
        return found

    def _order_statistics(self, rank: _Floats) -> _Floats:
        """Return the numbers at these ranks ``(sets, ranks)``; the elements of a bin are spread evenly over it."""
        at = self._find(rank)
        low, high = self._bounds(at - self._offset)
        count = self._flat[at]
        inside = (rank - (self._upto[at] - count - self._before) + 0.5) / count
        value: _Floats = np.where(low == high, low, low + inside * (high - low))
        for known, end in ((self._least, 0), (self._most, self.totals[:, None] - 1)):
            value = np.where(np.isfinite(known) & (rank == end) & np.isfinite(value), known, value)
        return value

    def _find(self, rank: _Floats) -> _Indices:
        """Return the places of the bins of these ranks ``(sets, ranks)``; a set without elements has the first bin."""
        found: _Indices = self._upto.searchsorted(self._before + rank, side="right")
        return np.where(self.totals[:, None] > 0, found, self._offset)

    def _bounds(self, bin_: _Indices) -> tuple[_Floats, _Floats]:
        """Return the smallest and the largest number that each of these bins ``(sets, bins)`` can hold."""
        bounds = self._low[bin_], self._high[bin_]
        is_finite = np.isfinite(bounds[0]) & np.isfinite(bounds[1])
        low, high = (np.where(is_finite, np.minimum(np.maximum(x, self._least), self._most), x) for x in bounds)
        return low, high

    def buckets(self, fractions: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Return where the buckets begin ``(sets,)``, where each ends, and the number of elements in it ``(sets, buckets)``."""
        outermost = self._find(np.stack([np.zeros(len(self.totals)), self.totals - 1.0], axis=1))
        low, high = self._bounds(outermost - self._offset)
        least = np.where(np.isfinite(self._least), self._least, low[:, :1])
        most = np.where(np.isfinite(self._most), self._most, high[:, 1:])
        limits = least + fractions * (most - least)
        limits[:, -1:] = most
        shares = self._counted_up_to(limits)
        shares[:, -1] = self.totals  # a largest number that float32 rounds up is below the bin that holds it
        shares[:, 1:] -= shares[:, :-1].copy()
        return least[:, 0], limits, shares

    def _counted_up_to(self, limits: _Floats) -> _Floats:
        """Return the number of elements up to each limit ``(sets, limits)``; bins of a single number are steps."""
        bin_ = np.maximum(self._low.searchsorted(limits, side="right") - 1, 0)
        low, high = self._bounds(bin_)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(high > low, np.minimum((limits - low) / (high - low), 1.0), 1.0)
        at = bin_ + self._offset
        count = self._flat[at]
        counted: _Floats = self._upto[at] - count - self._before + np.where(limits < low, 0.0, share) * count
        return counted

    def sums(self) -> tuple[list[float], list[float]]:
        """Return the sums of the elements and those of their squares, all in the middle of their bins."""
        low, high = self._bounds(np.arange(len(self._low))[None])
        middle = (low + high) / 2
        weighted = self._counts * middle
        return weighted.sum(axis=1).tolist(), (weighted * middle).sum(axis=1).tolist()


class NativeBins:
    """Compute by the native library what `Bins` computes, with the same numbers.

    Parameters
    ----------
    kernels : Library
        The native library.
    counts : sequence of array of int64
        ``(2K,)`` of each set.
    bounds : (array, array)
        Those of :func:`bin_bounds`.
    min, max : array
        ``(sets,)``, the extrema of the finite elements.
    finite_only : bool
        Whether the bins of infinite elements and NaN are left out.

    Attributes
    ----------
    totals : array of int64
        The number of elements of each set, known after `buckets`.
    """

    def __init__(
        self,
        kernels: Library,
        counts: Sequence[_Counts],
        bounds: tuple[_Floats, _Floats],
        min: _Floats,
        max: _Floats,
        finite_only: bool,
    ) -> None:
        self._kernels = kernels
        counts = [np.ascontiguousarray(each, np.int64) for each in counts]
        extrema = [np.ascontiguousarray(each, np.float64) for each in (min, max)]
        addresses = np.array([each.ctypes.data for each in counts], np.int64)
        arrays = addresses, *bounds, *extrema
        half = len(bounds[0]) // 2
        infinite = half // 256 * 255
        begin, end = (half - infinite, half + infinite) if finite_only else (0, 2 * half)
        numbers = len(counts), begin, end, half - 1 - infinite, half + infinite
        self._sets = np.array([*(each.ctypes.data for each in arrays), *numbers], np.int64)
        self._kept = counts, arrays  # the library has their addresses
        self.totals = np.zeros(len(counts), np.int64)
        self._is_held = np.zeros(2 * half, np.uint8)

    def quantiles(self, q: Sequence[float]) -> _Floats:
        """Return the quantiles ``(sets, quantiles)``."""
        asked, found = np.array(q, np.float64), np.empty((len(self.totals), len(q)))
        _check(self._kernels.quantiles(self._sets.ctypes.data, asked.ctypes.data, len(asked), found.ctypes.data))
        return found

    def buckets(self, fractions: _Floats) -> tuple[_Floats, _Floats, _Floats]:
        """Return where the buckets begin ``(sets,)``, where each ends, and the number of elements in it ``(sets, buckets)``."""
        shape = len(self.totals), len(fractions)
        begins, limits, shares = np.empty(len(self.totals)), np.empty(shape), np.empty(shape)
        arrays = limits, shares, self.totals, begins, self._is_held
        addresses = [each.ctypes.data for each in arrays]
        _check(self._kernels.buckets(self._sets.ctypes.data, fractions.ctypes.data, len(fractions), *addresses))
        return begins, limits, shares

    def sums(self) -> tuple[list[float], list[float]]:
        """Return the sums of the elements and those of their squares, after `buckets`."""
        sums, squares = np.empty((2, len(self.totals), np.count_nonzero(self._is_held)))
        arrays = self._sets, self._is_held, sums, squares
        self._kernels.weigh(*(each.ctypes.data for each in arrays))
        return sums.sum(axis=1).tolist(), squares.sum(axis=1).tolist()


def _check(has_memory: int) -> None:
    if not has_memory:
        raise MemoryError("no memory for the bins of a histogram")
