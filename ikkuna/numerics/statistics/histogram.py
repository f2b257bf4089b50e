"""Statistics from float codes: quantiles, shares below a threshold, buckets for TensorBoard."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import all_finite, readable
from ikkuna.numerics.statistics.float_code import bin_edges, codes, half_size
from ikkuna.numerics.statistics.record import Record

__all__ = ["Buckets", "Histogram"]

_SIZES = tuple(512 << m for m in range(1, 8))


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


@dataclass(frozen=True, eq=False)
class Histogram:
    r"""The histogram of a set of numbers by their float codes.

    Parameters
    ----------
    counts : array of int64
        ``(2K,)``, as :func:`~ikkuna.numerics.statistics.float_code.codes` returns it.
    zeros : int, optional
        Number of elements equal to 0; if it is unknown, magnitudes below 1.5e-39 (for m = 3) count as 0.
    min, max : float, optional
        Extrema of the finite elements, which make the outermost bins exact.

    Examples
    --------
    >>> h = Histogram.of(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]))
    >>> h.n, h.zeros, h.quantile(0.0), h.quantile(1.0), h.share_below(2.0)
    (5, 1, 0.0, 4.0, 0.4)
    >>> (h + h).n
    10
    """

    counts: NDArray[np.int64]
    zeros: int | None = None
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        if self.counts.ndim != 1 or len(self.counts) not in _SIZES:
            raise ConfigError(f"counts are {list(_SIZES)} numbers, got the shape {self.counts.shape}")

    @classmethod
    def of(cls, x: Tensor, m: int = 3) -> "Histogram":
        """Return the histogram of `x` with exact zeros and extrema; this synchronises with the device."""
        counts = codes(x, m).cpu().numpy()
        read = readable(x.detach())
        if read is None or not read[0].numel():
            return cls(counts, int(counts.sum()))
        values, implied = read
        finite = values if bool(all_finite(values)) else values[torch.isfinite(values)]
        bounds = tuple(v.item() for v in torch.aminmax(finite)) if finite.numel() else (math.inf, -math.inf)
        if implied:
            bounds = min(bounds[0], 0.0), max(bounds[1], 0.0)
        return cls(counts, values.numel() - int(torch.count_nonzero(values)) + implied, *bounds)

    @classmethod
    def of_record(cls, record: Record, exact: bool = False) -> "Histogram":
        """Return the histogram of a record's ``codes`` if `exact`, otherwise of its ``sampled_codes``."""
        counts = record.codes if exact else record.sampled_codes
        if counts is None:
            raise ConfigError(
                f"the field {'codes' if exact else 'sampled_codes'!r} was not measured; name it in `fields`"
            )
        low = record.min if record.finite_min is None else record.finite_min
        high = record.max if record.finite_max is None else record.finite_max
        return cls(counts, record.zeros if exact else None, low, high)

    @property
    def m(self) -> int:
        """Number of mantissa bits in a code."""
        return len(self.counts).bit_length() - 10

    @property
    def n(self) -> int:
        """Number of elements."""
        return int(self.counts.sum())

    @property
    def nans(self) -> int:
        """Number of NaN; signalling NaN, which no operation returns, may count as infinite."""
        half, first = half_size(self.m), (255 << self.m) + 1
        return int(self.counts[half + first :].sum() + self.counts[: half - first].sum())

    @property
    def infs(self) -> int:
        """Number of infinite elements."""
        half, code = half_size(self.m), 255 << self.m
        return int(self.counts[half + code] + self.counts[half - 1 - code])

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return the histogram of both sets together."""
        if self.m != other.m:
            raise ConfigError(
                f"cannot add histograms with {self.m} and {other.m} mantissa bits; build both with the same m"
            )
        if not self.n or not other.n:
            return self if self.n else other
        zeros = None if self.zeros is None or other.zeros is None else self.zeros + other.zeros
        bounds = (_extremum(np.minimum, self.min, other.min), _extremum(np.maximum, self.max, other.max))
        return Histogram(self.counts + other.counts, zeros, *bounds)

    def magnitudes(self) -> NDArray[np.int64]:
        """Return the counts of :math:`|x|`, finite or not: ``(K,)``, rising."""
        half = half_size(self.m)
        return self.counts[half:] + self.counts[half - 1 :: -1]

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
        asked = np.asarray(q, dtype=np.float64)
        held = self._occupied(finite_only)
        if not len(held) or not self._are_numbers(held):
            result = np.full(asked.shape, np.nan)
        else:
            cumulative = self.counts[held].cumsum()
            rank = (cumulative[-1] - 1) * asked
            below, above = self._order_statistic(held, cumulative, np.array([np.floor(rank), np.ceil(rank)]))
            with np.errstate(invalid="ignore"):  # NaN between an infinity and its neighbour, as in numpy
                result = below + np.where(above == below, 0.0, (above - below) * (rank - np.floor(rank)))
        return result.item() if result.ndim == 0 else result

    def share_below(self, threshold: float) -> float:
        r"""Return the share of finite elements with :math:`|x| <` `threshold`, zeros included.

        It is exact for a power of two and any other edge of a bin, and otherwise interpolated within one bin.
        It is NaN for no finite elements.
        """
        counts = self.magnitudes()[: 255 << self.m]
        n = int(counts.sum())
        if not n:
            return float("nan")
        edges = bin_edges(self.m)[half_size(self.m) :][: len(counts) + 1]
        covered = np.clip((threshold - edges[:-1]) / np.diff(edges), 0.0, 1.0)
        covered[0] = float(threshold > 0)  # this bin is assumed to hold zeros only
        return float(counts @ covered / n)

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
        held = self._occupied(finite_only=True)
        if not len(held):
            return Buckets(float("nan"), float("nan"), 0, 0.0, 0.0, [], [])
        counts = self.counts[held]
        low, high = self._bounds(held)
        # the innermost bins count as 0, but known extrema are exact
        known_least, known_most = self._extrema()
        least = float(low[0]) if known_least is None else known_least
        most = float(high[-1]) if known_most is None else known_most
        limits = least + _fractions(n) * (most - least) if most > least else np.array([most])
        limits[-1] = most
        shares = _counted_up_to(limits, low, high, counts)
        shares[1:] -= shares[:-1].copy()
        middle = (low + high) / 2
        weighted = counts * middle
        total, squares = float(weighted.sum()), float(weighted @ middle)
        return Buckets(least, most, int(counts.sum()), total, squares, limits.tolist(), shares.tolist())

    def _occupied(self, finite_only: bool) -> NDArray[np.intp]:
        """Return the rising indices of the bins that are not empty: a few hundred of thousands."""
        half = half_size(self.m)
        end = 255 << self.m if finite_only else half
        occupied = self.counts[half - end : half + end] != 0  # ``nonzero`` of booleans is four times as fast
        held: NDArray[np.intp] = occupied.nonzero()[0]
        held += half - end
        return held

    def _are_numbers(self, held: NDArray[np.intp]) -> bool:
        """Return whether the outermost of these bins, and so all of them, are not bins of NaN."""
        half, infinite = half_size(self.m), 255 << self.m
        return bool(half - 1 - infinite <= held[0] and held[-1] <= half + infinite)

    def _bounds(self, held: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the smallest and the largest number that each of these bins, which are not of NaN, can hold."""
        low, high = (bound[held] for bound in _bin_bounds(self.m))
        finite = slice(int(low[0] == -np.inf), len(held) - int(high[-1] == np.inf))
        least, most = self._extrema()
        for bound in (low[finite], high[finite]):
            if least is not None:
                np.maximum(bound, least, out=bound)
            if most is not None:
                np.minimum(bound, most, out=bound)
        return low, high

    def _extrema(self) -> tuple[float | None, float | None]:
        """Return the smallest and the largest number, each ``None`` if it is unknown or not finite."""
        least, most = (known if known is not None and math.isfinite(known) else None for known in (self.min, self.max))
        return least, most

    def _order_statistic(
        self, held: NDArray[np.intp], cumulative: NDArray[np.int64], rank: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        low, high = self._bounds(held)
        outermost = low[0], high[-1]
        index = cumulative.searchsorted(rank, side="right")
        low, high, count = low[index], high[index], self.counts[held[index]]
        inside = (rank - cumulative[index] + count + 0.5) / count
        with np.errstate(invalid="ignore"):
            value: NDArray[np.float64] = np.where(low == high, low, low + inside * (high - low))
        for known, end, bound in zip(self._extrema(), (0, cumulative[-1] - 1), outermost, strict=True):
            if known is not None and math.isfinite(bound):
                value[rank == end] = known
        return value


@cache
def _bin_bounds(m: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the smallest and the largest number that each bin can hold; magnitudes of the innermost bins count as 0."""
    edges, half, infinite = bin_edges(m), half_size(m), 255 << m
    low, high = edges[:-1].copy(), edges[1:].copy()
    low[half - 1 : half + 1] = high[half - 1 : half + 1] = 0.0
    low[half + infinite], high[half - 1 - infinite] = np.inf, -np.inf
    return low, high


@cache
def _fractions(n: int) -> NDArray[np.float64]:
    return np.arange(1, n + 1) / n


def _counted_up_to(
    limits: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the number of elements up to each limit, spread evenly over their bins; bins of a single number are steps."""
    above, ends, counted = counts.cumsum(), np.empty(2 * len(low)), np.empty(2 * len(low))
    ends[::2], ends[1::2] = low, high
    counted[::2], counted[1::2] = above - counts, above
    found: NDArray[np.float64] = np.interp(limits, ends, counted)
    return found


def _extremum(pick: Any, a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float(pick(a, b))
