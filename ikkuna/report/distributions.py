"""Distributions over time: the histograms of a module as a heat map value × step."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.reading import StoredHistogram, StoredRun
from ikkuna.report.heatmaps import ReportHeatmap, draw_heatmap
from ikkuna.visualization.pictures.colour_scale import ColourScale

__all__ = ["distributions_of", "rebinned"]

_MODULES, _TIMES, _BINS = 8, 60, 32


def rebinned(histogram: StoredHistogram, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the values of a histogram in each bin; values are spread evenly over their bucket.

    Examples
    --------
    >>> histogram = StoredHistogram(0.0, 2.0, 4.0, 4.0, 5.0, np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    >>> rebinned(histogram, np.array([0.0, 1.0, 2.0])).tolist()
    [0.25, 0.75]
    """
    limits = np.clip(np.concatenate([[histogram.min], histogram.bucket_limits]), histogram.min, histogram.max)
    total = float(histogram.bucket_counts.sum())
    if not total or not np.isfinite(limits).all():
        return np.zeros(len(edges) - 1)
    below = np.concatenate([[0.0], np.cumsum(histogram.bucket_counts)]) / total
    if limits[-1] <= limits[0]:  # all values are equal
        return np.histogram([limits[0]], edges)[0].astype(float)
    kept = np.concatenate([[True], np.diff(limits) > 0])
    return np.diff(np.interp(edges, limits[kept], below[kept], left=0.0, right=1.0))


def distributions_of(run: StoredRun) -> list[ReportHeatmap]:
    """Return a heat map for each kind with histograms and each of at most 8 modules; the largest values are at the top."""
    found = []
    for kind in run.histogram_kinds():
        names = run.histogram_names(kind)
        for name in [names[round(i)] for i in np.linspace(0, len(names) - 1, min(len(names), _MODULES))]:
            if (drawn := _distribution(kind, name, list(run.histograms(kind, name)))) is not None:
                found.append(drawn)
    return found


def _distribution(kind: str, name: str | None, stored: list[tuple[int, Any]]) -> ReportHeatmap | None:
    stored = [pair for pair in stored if np.isfinite([pair[1].min, pair[1].max]).all()]
    if not stored:
        return None
    chosen = [stored[round(i)] for i in np.linspace(0, len(stored) - 1, min(len(stored), _TIMES))]
    low, high = min(h.min for _, h in chosen), max(h.max for _, h in chosen)
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    shares = np.stack([rebinned(histogram, edges) for _, histogram in chosen], axis=1)[::-1]
    labels = [f"{edge:.3g}" for edge in edges[1:][::-1]]
    steps = np.array([step for step, _ in chosen], np.int64)
    scale = ColourScale.of("count", shares)
    return draw_heatmap(
        f"{kind} · {name or 'network'}", "count", labels, steps, shares, shares > 0, scale, is_clear=True
    )
