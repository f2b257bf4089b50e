"""Quantiles, shares and buckets from float codes, and exact percentiles."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import all_finite, flatten, host_array, readable
from ikkuna.numerics.statistics.float_code import bin_edges, codes, half_size
from ikkuna.numerics.statistics.native import Library, library
from ikkuna.numerics.statistics.record import Records

_Floats = NDArray[np.float64]
_Counts = NDArray[np.int64]
_Indices = NDArray[np.intp]
_BLOCK = 64  # sets: arrays of 2 MiB, which stay in a cache


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


class _NativeBins:
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
    native : bool
        Whether to use the C++ library if it is available, which computes the same numbers.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.numerics.statistics.float_code import codes
    >>> x = torch.arange(5.0)
    >>> histograms = Histograms([codes(x).numpy(), codes(-x).numpy()], np.array([0.0, -4.0]), np.array([4.0, 0.0]))
    >>> histograms.quantile([0.0, 1.0]).tolist()
    [[0.0, -4.0], [4.0, 0.0]]
    """

    def __init__(self, counts: Sequence[NDArray[np.int64]], min: _Floats, max: _Floats, *, native: bool = True) -> None:
        self._counts, self._min, self._max = counts, min, max
        self._kernels = library() if native else None

    @classmethod
    def of_records(cls, records: Records, exact: bool = False) -> "Histograms":
        """Return the histograms of records with ``codes`` if `exact`, otherwise of those with ``sampled_codes``."""
        return cls(records.codes if exact else records.sampled_codes, records.finite_min, records.finite_max)

    def quantile(self, q: Sequence[float], finite_only: bool = False) -> _Floats:
        """Return the quantiles ``(quantiles, sets)``, see `Histogram.quantile`."""
        return np.concatenate([bins.quantiles(q) for bins in self._blocks(finite_only)]).T

    def tensorboard_buckets(self, n: int = 30) -> list[Buckets]:
        """Return the buckets of each set, see `Histogram.tensorboard_buckets`."""
        return [buckets for bins in self._blocks(finite_only=True) for buckets in _made(bins, n)]

    def _blocks(self, finite_only: bool) -> Iterator[Bins | _NativeBins]:
        for first in range(0, len(self._counts), _BLOCK):
            part = slice(first, first + _BLOCK)
            counts, extrema = self._counts[part], (self._min[part], self._max[part])
            bounds = bin_bounds(len(counts[0]).bit_length() - 10)
            if self._kernels is None:
                yield Bins(np.stack(counts), bounds, *extrema, finite_only)
            else:
                yield _NativeBins(self._kernels, counts, bounds, *extrema, finite_only)


def _made(bins: Bins | _NativeBins, n: int) -> Iterator[Buckets]:
    """Yield the buckets of each set; one bucket of constant data."""
    begins, limits, shares = bins.buckets(_fractions(n))
    sums, squares = bins.sums()
    for i, (least, total) in enumerate(zip(begins.tolist(), bins.totals.tolist(), strict=True)):
        if not total:
            yield Buckets(np.nan, np.nan, 0, 0.0, 0.0, [], [])
            continue
        edges, counts = limits[i].tolist(), shares[i].tolist()
        if not edges[-1] > least:
            edges, counts = edges[-1:], [float(total)]
        yield Buckets(least, edges[-1], total, sums[i], squares[i], edges, counts)


@cache
def _fractions(n: int) -> _Floats:
    return np.arange(1, n + 1) / n


_SIZES = tuple(512 << m for m in range(1, 8))


@dataclass(frozen=True, eq=False)
class Histogram:
    r"""The histogram of a set of numbers by their float codes.

    Parameters
    ----------
    counts : array of int64
        ``(2K,)``, as :func:`~ikkuna.numerics.statistics.float_code.codes` returns it.
    min, max : float, optional
        Extrema of the finite elements, which make the outermost bins exact.

    Examples
    --------
    >>> h = Histogram.of(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))
    >>> h.n, h.quantile(0.0), h.quantile(1.0)
    (5, 0.0, 4.0)
    """

    counts: NDArray[np.int64]
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if self.counts.ndim != 1 or len(self.counts) not in _SIZES:
            raise ConfigError(f"counts are {list(_SIZES)} numbers, got the shape {self.counts.shape}")

    @classmethod
    def of(cls, x: Tensor, m: int = 3) -> "Histogram":
        """Return the histogram of `x` with exact extrema; this synchronises with the device."""
        counts = codes(x, m).cpu().numpy()
        read = readable(x.detach())
        if read is None or not read[0].numel():
            return cls(counts)
        values, implied = read
        finite = values if bool(all_finite(values)) else values[torch.isfinite(values)]
        bounds = tuple(v.item() for v in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
        if implied:
            bounds = min(bounds[0], 0.0), max(bounds[1], 0.0)
        return cls(counts, *bounds)

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(self.counts.sum())

    def quantile(self, q: float | Sequence[float], finite_only: bool = False) -> Any:
        r"""Return the linear-interpolation quantile (Hyndman and Fan 1996, type 7) at `q`, within one bin of numpy's.

        It lies at rank :math:`h = (n-1) q` between two order statistics; the elements of a bin are assumed to be evenly
        spread over it.

        Parameters
        ----------
        q : float or sequence of floats
            In [0, 1].
        finite_only : bool
            Ignore infinite and NaN elements.  Otherwise infinite elements are ordered like others, and with a NaN
            every quantile is NaN.

        Returns
        -------
        float or numpy.ndarray
            In the unit of the data; NaN for no elements.

        Examples
        --------
        >>> Histogram.of(torch.arange(101.0)).quantile([0.0, 0.5, 1.0]).round(1).tolist()
        [0.0, 50.5, 100.0]
        """
        asked = np.asarray(q, np.float64)
        found = together([self]).quantile(asked.reshape(-1).tolist(), finite_only).reshape(asked.shape)
        return found.item() if found.ndim == 0 else found

    def tensorboard_buckets(self, n: int = 30) -> Buckets:
        """Return the finite elements in `n` buckets of equal width between their extrema.

        A bin across an edge is divided in proportion; ``sum`` and ``sum_squares`` come from the middles of the bins.
        Without finite elements there is no bucket, and the extrema are NaN.  Constant data gives a single bucket.

        Examples
        --------
        >>> b = Histogram.of(torch.tensor([0.0, 0.0, 1.0, 3.0])).tensorboard_buckets(3)
        >>> b.bucket_limits, b.bucket_counts
        ([1.0, 2.0, 3.0], [2.0, 1.0, 1.0])
        """
        return together([self]).tensorboard_buckets(n)[0]


def together(histograms: Sequence[Histogram]) -> Histograms:
    """Return several histograms with the same number of mantissa bits as one object, which computes for all of them at once."""
    least, most = (np.array([getattr(h, name) for h in histograms], np.float64) for name in ("min", "max"))
    return Histograms([h.counts for h in histograms], least, most)


SIGMA = (0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87)
"""The percentiles of a normal distribution at its mean, and 1, 2 and 3 standard deviations below and above it."""


def percentiles(x: Tensor | Sequence[Tensor], q: Sequence[float] = SIGMA) -> list[float]:
    r"""Return the `q`-th percentiles of the elements of `x`.

    With the elements sorted, :math:`h = (n - 1)\, q / 100` and :math:`f = h - \lfloor h \rfloor`,
    the percentile is :math:`x_{\lfloor h \rfloor} + f\,(x_{\lfloor h \rfloor + 1} - x_{\lfloor h \rfloor})`.
    On the CPU numpy's vectorised sort is used, which costs as much as 30 sums over the tensor
    (``torch.quantile`` costs 270, and is limited to 2**24 elements).

    Parameters
    ----------
    x : Tensor or sequence of Tensor
        Any shape and dtype; several tensors are pooled.
    q : sequence of float
        From 0 to 100.

    Returns
    -------
    list of float
        All NaN if there are no elements, or if one is NaN.

    Raises
    ------
    ConfigError
        If a percentile is not between 0 and 100.

    Examples
    --------
    >>> percentiles(torch.tensor([10.0, 30.0, 20.0]), [0, 50, 75])
    [10.0, 20.0, 25.0]
    """
    if wrong := [p for p in q if not 0 <= p <= 100]:
        raise ConfigError(f"a percentile must be between 0 and 100, got {wrong[0]}")
    values = _sorted(_pool([x] if isinstance(x, Tensor) else x))
    n = values.shape[0]
    if n == 0 or bool(np.isnan(values[-1])):
        return [float("nan")] * len(q)
    return [_interpolate(values, (n - 1) * p / 100) for p in q]


def _pool(tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = []
    for tensor in tensors:
        read = readable(tensor.detach())
        if read is None:
            continue
        values, implied = read
        values = values if values.dtype is torch.float64 else values.float()
        parts.append(flatten(values))
        if implied:
            parts.append(values.new_zeros(implied))
    return parts


def _sorted(parts: list[Tensor]) -> NDArray[np.floating]:
    """Return a new sorted array, with NaN at the end."""
    if not parts:
        return np.zeros(0)
    if parts[0].device.type != "cpu":
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.sort().values.cpu().numpy()
    arrays = [host_array(part) for part in parts]
    values = arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)
    values.sort()
    return values


def _interpolate(values: NDArray[np.floating], h: float) -> float:
    below = int(h)
    low = float(values[below])
    if below == h:
        return low
    high = float(values[below + 1])
    return low + (h - below) * (high - low) if low != high else low
