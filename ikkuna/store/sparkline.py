"""Curves and matrices with fewer points, and small curves without axes: as characters, and as SVG."""

import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEVELS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
"""Characters of eight heights, and those of ASCII that take their place."""
_CHARACTERS = 24
_POINTS = 24


def reduced_curve(
    steps: NDArray[np.int64], values: NDArray[np.float64], points: int = 400
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `points` points of a curve.

    Each part keeps its smallest and its largest value, or the first value that is not finite.

    Examples
    --------
    >>> steps, values = reduced_curve(np.arange(1000), np.sin(np.arange(1000)), 10)
    >>> len(steps), float(values.max().round(3))
    (10, 1.0)
    """
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), max(points // 2, 1) + 1).astype(int)
    begins, ends = edges[:-1, None], edges[1:, None]
    inside = np.minimum(begins + np.arange((ends - begins).max()), ends - 1)  # (parts, values of a part)
    parts = values[inside]
    is_bad = ~np.isfinite(parts)
    has_bad = is_bad.any(axis=1)
    first = np.where(has_bad, 0, np.where(is_bad, np.inf, parts).argmin(axis=1))
    second = np.where(has_bad, is_bad.argmax(axis=1), np.where(is_bad, -np.inf, parts).argmax(axis=1))
    places = np.unique(edges[:-1] + np.stack([first, second]))
    return steps[places], values[places]


def reduced_matrix(
    steps: NDArray[np.int64], values: NDArray[np.float64], present: NDArray[np.bool_], columns: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return means over groups of neighbouring steps, NaN if a value of the group is not finite, and which values are there.

    Parameters
    ----------
    steps : ndarray (steps,)
        The steps.
    values : ndarray (rows, steps)
        The values.
    present : ndarray (rows, steps)
        Which values are there.
    columns : int
        The largest number of columns.
    """
    if len(steps) <= columns:
        return steps, values, present
    edges = np.linspace(0, len(steps), columns + 1).astype(int)[:-1]
    with np.errstate(all="ignore"):
        total = np.add.reduceat(np.where(present, values, 0.0), edges, axis=1)
        count = np.add.reduceat(present, edges, axis=1, dtype=np.int64)
        means = total / count
    means[~np.isfinite(means)] = np.nan
    return steps[edges], means, count > 0


def text_sparkline(values: Sequence[float]) -> str:
    """Return the latest values as characters of eight heights; ``!`` for a value that is not finite.

    Characters of ASCII take their place if the standard output has no others.

    Examples
    --------
    >>> text_sparkline([0.0, 1.0, float("nan")])[-1]
    '!'
    """
    values = list(values)[-_CHARACTERS:]
    finite = [value for value in values if math.isfinite(value)]
    levels = LEVELS if (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf") else ASCII
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    size = high / 7 - low / 7  # the difference itself may be infinite
    return "".join(
        "!" if not math.isfinite(value) else levels[round(value / size - low / size) if size else 0] for value in values
    )


def svg_sparkline(values: NDArray[np.float64], *, is_log: bool = False) -> str:
    """Return a curve of 80 by 18 pixels as SVG; empty without finite values.

    Examples
    --------
    >>> svg_sparkline(np.array([0.0, 1.0]))
    '<svg class="sparkline" width="80" height="18" viewBox="0 0 80 18"><polyline points="0,17 80,1" fill="none" stroke="#2f6fd0"/></svg>'
    """
    _, values = reduced_curve(np.arange(len(values)), values, _POINTS)
    with np.errstate(all="ignore"):
        heights = np.log(values) if is_log and (values[np.isfinite(values)] > 0).all() else values.astype(float)
    is_drawn = np.isfinite(heights)
    if not is_drawn.any():
        return ""
    low, high = float(heights[is_drawn].min()), float(heights[is_drawn].max())
    share = (heights / 2 - low / 2) / (
        high / 2 - low / 2 if high > low else 1.0
    )  # the difference itself may be infinite
    up = np.where(is_drawn, 17 - 16 * share, 0).round().astype(int)
    across = np.linspace(0, 80, len(values)).round().astype(int) if len(values) > 1 else np.array([40])
    points = " ".join([f"{x},{y}" for x, y in zip(across[is_drawn].tolist(), up[is_drawn].tolist(), strict=True)])
    return (
        '<svg class="sparkline" width="80" height="18" viewBox="0 0 80 18">'
        f'<polyline points="{points}" fill="none" stroke="#2f6fd0"/></svg>'
    )
