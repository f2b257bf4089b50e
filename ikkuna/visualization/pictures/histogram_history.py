"""Histograms of one module at some of its steps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.histogram import HistogramLike
from ikkuna.visualization.pictures.decimator import Decimator, keep_first

__all__ = ["HistogramAtStep", "HistogramHistory"]

_CAPACITY = 16


@dataclass(frozen=True, eq=False)
class HistogramAtStep:
    """One histogram.

    Parameters
    ----------
    step : int
    counts : ndarray
        (bucket,)
    edges : ndarray
        (bucket + 1,)
    """

    step: int
    counts: NDArray[np.float64]
    edges: NDArray[np.float64]


class HistogramHistory:
    """Keeps up to 16 evenly spaced histograms, and the latest.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.histograms import Buckets
    >>> history = HistogramHistory()
    >>> for step in range(100):
    ...     history.add(step, Buckets(0.0, 2.0, 3, 0.0, 0.0, [1.0, 2.0], [2.0, 1.0]))
    >>> [histogram.step for histogram in history.view()], history.view()[0].edges.tolist()
    ([0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 99], [0.0, 1.0, 2.0])
    """

    def __init__(self) -> None:
        self._kept: Decimator[HistogramAtStep] = Decimator(_CAPACITY, keep_first)
        self._latest: HistogramAtStep | None = None

    def add(self, step: int, histogram: HistogramLike) -> None:
        """Add a histogram; an empty one is ignored."""
        counts = np.array(histogram.bucket_counts, np.float64)
        if counts.any():
            self._latest = HistogramAtStep(step, counts, _edges(histogram))
            self._kept.add(self._latest)

    def view(self) -> list[HistogramAtStep]:
        """Return the histograms, the earliest first."""
        kept = self._kept.entries()
        return kept if self._latest is None or kept[-1] is self._latest else [*kept, self._latest]


def _edges(histogram: HistogramLike) -> NDArray[np.float64]:
    """Return the edges of all buckets; the left edge of the first one follows from the minimum."""
    limits = np.array(histogram.bucket_limits, np.float64)
    width = limits[1] - limits[0] if len(limits) > 1 else 0.0
    first = histogram.min if histogram.min < limits[0] else limits[0] - (width or abs(limits[0]) * 0.01 or 0.01)
    return np.concatenate([[first], limits])
