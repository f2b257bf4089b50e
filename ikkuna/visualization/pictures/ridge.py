"""Histograms of one module over the steps, in bounded number."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.histogram import HistogramLike

__all__ = ["ROWS", "Ridge", "Row"]

ROWS = 16


@dataclass(frozen=True, eq=False)
class Row:
    """One histogram: counts (bucket), edges (bucket + 1)."""

    step: int
    counts: NDArray[np.float64]
    edges: NDArray[np.float64]


class Ridge:
    """Takes the histogram of a step after another.

    Whatever the length of a run, up to 16 are kept, evenly spread, and the latest.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.histogram import Buckets
    >>> ridge = Ridge()
    >>> for step in range(100):
    ...     ridge.add(step, Buckets(0.0, 2.0, 3, 0.0, 0.0, [1.0, 2.0], [2.0, 1.0]))
    >>> [row.step for row in ridge.rows()], ridge.rows()[0].edges.tolist()
    ([0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 99], [0.0, 1.0, 2.0])
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._latest: Row | None = None
        self._seen = 0
        self._stride = 1

    def add(self, step: int, histogram: HistogramLike) -> None:
        """Take a histogram; one without elements is passed over."""
        counts = np.array(histogram.bucket_counts, np.float64)
        if not counts.any():
            return
        row = self._latest = Row(step, counts, _edges(histogram))
        if self._seen % self._stride == 0:
            if len(self._rows) == ROWS:
                self._rows = self._rows[::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._rows.append(row)
        self._seen += 1

    def rows(self) -> list[Row]:
        """Return what is kept, the earliest first."""
        if self._latest is None or self._rows[-1] is self._latest:
            return list(self._rows)
        return [*self._rows[-(ROWS - 1) :], self._latest]


def _edges(histogram: HistogramLike) -> NDArray[np.float64]:
    """Return the edges of all buckets; the left one of the first is not said, but the least element is."""
    limits = np.array(histogram.bucket_limits, np.float64)
    width = limits[1] - limits[0] if len(limits) > 1 else 0.0
    first = histogram.min if histogram.min < limits[0] else limits[0] - (width or abs(limits[0]) * 0.01 or 0.01)
    return np.concatenate([[first], limits])
