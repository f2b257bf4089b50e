"""Statistics from float codes: quantiles, shares below a threshold, buckets for TensorBoard."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import all_finite, readable
from ikkuna.numerics.statistics.float_code import bin_edges, codes, half_size
from ikkuna.numerics.statistics.histograms import Buckets, Histograms
from ikkuna.numerics.statistics.record import Record

__all__ = ["Histogram", "together"]

_SIZES = tuple(512 << m for m in range(1, 8))


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
        asked = np.asarray(q, np.float64)
        found = together([self]).quantile(asked.reshape(-1).tolist(), finite_only).reshape(asked.shape)
        return found.item() if found.ndim == 0 else found

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
        return together([self]).tensorboard_buckets(n)[0]


def together(histograms: Sequence[Histogram]) -> Histograms:
    """Return several histograms with the same number of mantissa bits as one object, which computes for all of them at once."""
    least, most = (np.array([getattr(h, name) for h in histograms], np.float64) for name in ("min", "max"))
    return Histograms([h.counts for h in histograms], least, most)


def _extremum(pick: Any, a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else float(pick(a, b))
