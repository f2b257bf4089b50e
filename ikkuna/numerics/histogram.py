"""What float codes tell of a set of numbers: quantiles, shares below a threshold, buckets for TensorBoard."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import readable
from ikkuna.numerics.float_code import bin_edges, codes, half_size
from ikkuna.numerics.statistics import Record

__all__ = ["Buckets", "Histogram"]


@dataclass(frozen=True)
class Buckets:
    """A histogram as TensorBoard stores it: `bucket_limits` are right edges, `bucket_counts` may be fractions."""

    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    bucket_counts: list[float]


@dataclass(frozen=True, eq=False)
class Histogram:
    r"""What the float codes of a set of numbers tell.

    Parameters
    ----------
    counts : int64 array ``(2K,)``, as :func:`~ikkuna.numerics.float_code.codes` gives it
    zeros : number of elements equal to 0, if known; otherwise magnitudes below 1.5e-39 (for m = 3) pass as 0
    min, max : extrema, if known; they sharpen the outermost bins

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
        if (
            self.counts.ndim != 1
            or (len(self.counts) >> 9) not in [1 << m for m in range(1, 8)]
            or len(self.counts) % 512
        ):
            raise ConfigError(
                f"counts are {[512 << m for m in range(1, 8)]} numbers, got the shape {self.counts.shape}"
            )

    @classmethod
    def of(cls, x: Tensor, m: int = 3) -> "Histogram":
        """Return the histogram of `x` with its exact zeros and extrema; for a person or a test, it synchronises."""
        counts = codes(x, m).cpu().numpy()
        read = readable(x.detach())
        if read is None or not read[0].numel():
            return cls(counts, int(counts.sum()))
        values, implied = read
        low, high = (v.item() for v in torch.aminmax(values))
        bounds = (min(low, 0.0), max(high, 0.0)) if implied else (low, high)
        return cls(counts, values.numel() - int(torch.count_nonzero(values)) + implied, *bounds)

    @classmethod
    def of_record(cls, record: Record, exact: bool = False) -> "Histogram":
        """Return the histogram that a record's ``codes`` (or ``sampled_codes``) stand for."""
        counts = record.codes if exact else record.sampled_codes
        if counts is None:
            raise ConfigError(
                f"the field {'codes' if exact else 'sampled_codes'!r} was not measured; name it in `fields`"
            )
        return cls(counts, record.zeros if exact else None, record.min, record.max)

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
        """Number of NaN (signalling ones, which no operation makes, may pass as infinite)."""
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
            raise ConfigError(f"histograms with {self.m} and {other.m} mantissa bits do not add; build both with one m")
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

        It lies at rank :math:`h = (n-1) q` between two order statistics; those of a bin are taken to be evenly spread
        over it.

        Parameters
        ----------
        q : float or sequence of floats
            In [0, 1].
        finite_only : bool
            Leave out infinite and NaN elements.  Otherwise infinite ones have their place in the order, and a NaN
            makes every
            quantile NaN.

        Returns
        -------
        float or numpy.ndarray
            In the unit of the data; NaN for no element.

        Examples
        --------
        >>> Histogram.of(torch.arange(101.0)).quantile([0.0, 0.5, 1.0]).round(1).tolist()
        [0.0, 50.5, 100.0]
        """
        counts = self._finite() if finite_only else self.counts
        n = int(counts.sum())
        asked = np.asarray(q, dtype=np.float64)
        if not n or (self.nans and not finite_only):
            result = np.full(asked.shape, np.nan)
        else:
            rank = (n - 1) * asked
            below, above = (self._order_statistic(counts, side(rank)) for side in (np.floor, np.ceil))
            with np.errstate(invalid="ignore"):  # beside an infinity lies no number: NaN, as numpy has it
                step = np.where(above == below, 0.0, (above - below) * (rank - np.floor(rank)))
                result = below + step
        return result.item() if result.ndim == 0 else result

    def share_below(self, threshold: float) -> float:
        r"""Return the share of finite elements with :math:`|x| <` `threshold`, zeros included.

        Exact for a power of two and any other edge of a bin; elsewhere interpolated within one bin.  NaN for no
        finite element.
        """
        counts = self.magnitudes()[: 255 << self.m]
        n = int(counts.sum())
        if not n:
            return float("nan")
        edges = bin_edges(self.m)[half_size(self.m) :][: len(counts) + 1]
        covered = np.clip((threshold - edges[:-1]) / np.diff(edges), 0.0, 1.0)
        covered[0] = float(threshold > 0)  # this bin is taken to hold nothing but zeros
        return float(counts @ covered / n)

    def tensorboard_buckets(self, n: int = 30) -> Buckets:
        """Return the finite elements in `n` buckets of equal width between their extrema.

        A bin that straddles an edge is divided in proportion; ``sum`` and ``sum_squares`` come from the middles of
        the bins.
        No finite element gives no bucket and NaN extrema, constant data a single bucket.

        Examples
        --------
        >>> b = Histogram.of(torch.tensor([0.0, 0.0, 1.0, 3.0])).tensorboard_buckets(3)
        >>> b.bucket_limits, b.bucket_counts
        ([1.0, 2.0, 3.0], [2.0, 1.0, 1.0])
        """
        counts = self._finite()
        held = np.flatnonzero(counts)
        if not len(held):
            return Buckets(float("nan"), float("nan"), 0, 0.0, 0.0, [], [])
        low, high = (edge[held] for edge in self._bounds())
        counts = counts[held]
        # the innermost bins pass as 0, but what is known exactly is said exactly
        least = self.min if self.min is not None and np.isfinite(self.min) else float(low[0])
        most = self.max if self.max is not None and np.isfinite(self.max) else float(high[-1])
        limits = np.linspace(least, most, n + 1)[1:] if most > least else np.array([most])
        width = np.where(high > low, high - low, 1.0)
        inside = np.where(high > low, (limits[:, None] - low) / width, limits[:, None] >= high)
        shares = np.diff(np.clip(inside, 0.0, 1.0) @ counts, prepend=0.0)
        middle = (low + high) / 2
        total, squares = float(counts @ middle), float(counts @ middle**2)
        return Buckets(least, most, int(counts.sum()), total, squares, limits.tolist(), shares.tolist())

    def _finite(self) -> NDArray[np.int64]:
        half, end = half_size(self.m), 255 << self.m
        finite = np.zeros_like(self.counts)
        finite[half - end : half + end] = self.counts[half - end : half + end]
        return finite

    def _bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least and the largest number each bin can hold."""
        edges, half = bin_edges(self.m), half_size(self.m)
        low, high = edges[:-1].copy(), edges[1:].copy()
        low[half - 1 : half + 1] = high[half - 1 : half + 1] = 0.0
        infinite = 255 << self.m
        low[half + infinite], high[half - 1 - infinite] = np.inf, -np.inf
        least = -np.inf if self.min is None or np.isnan(self.min) else self.min
        most = np.inf if self.max is None or np.isnan(self.max) else self.max
        finite = slice(half - infinite, half + infinite)
        for bound in (low, high):
            bound[finite] = np.clip(
                bound[finite], least if np.isfinite(least) else None, most if np.isfinite(most) else None
            )
        return low, high

    def _order_statistic(self, counts: NDArray[np.int64], rank: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = self._bounds()
        cumulative = np.cumsum(counts)
        held = np.searchsorted(cumulative, rank, side="right")
        inside = (rank - cumulative[held] + counts[held] + 0.5) / counts[held]
        with np.errstate(invalid="ignore"):
            value = np.where(low[held] == high[held], low[held], low[held] + inside * (high[held] - low[held]))
        for known, place in ((self.min, 0), (self.max, cumulative[-1] - 1)):
            if known is not None and np.isfinite(known):
                value = np.where(rank == place, known, value)
        return value


def _extremum(pick: Any, a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float(pick(a, b))
