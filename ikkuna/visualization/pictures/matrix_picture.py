"""Draws a matrix as an image, such as one of modules by modules."""

import math
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from ikkuna.plot.figure import NotebookFigure
from ikkuna.visualization.pictures.canvas import LINE, Canvas, Labels
from ikkuna.visualization.pictures.labels import printable
from ikkuna.visualization.pictures.scale import bounded, is_logarithmic

__all__ = ["draw_matrix", "scaled"]

_NONFINITE = (230, 0, 60, 255)  # a colour that the colour map lacks
_MISSING = (226, 230, 238, 255)


def draw_matrix(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    known: NDArray[np.bool_] | None = None,
    limits: tuple[float, float] | None = None,
    title: str = "",
) -> NotebookFigure:
    """Return the picture of a matrix, its first row on top.

    Rows and columns are labelled where there is space.
    Values that are not finite are red, missing ones grey.
    The scale is linear between `limits`; without limits it is logarithmic where :func:`is_logarithmic` says so.
    Texts are never read as formulas: matplotlib's parser of formulas must not run in two threads at a time.

    Parameters
    ----------
    values : ndarray
        (row, column); neither is empty.
    rows, columns : sequence of str
        Names.
    known : ndarray, optional
        (row, column), whether there is a value.
    limits : (float, float), optional
        Ends of the scale.
    title : str
        Text above the picture.
    """
    shares, ends = scaled(values if known is None else np.where(known, values, math.nan), limits)
    height = max(1, min(24, 420 // len(rows)))
    width = max(1, max(512, len(rows) * height * 5 // 4) // len(columns))
    row_labels = Labels(rows, height)
    column_labels = Labels(columns, width, is_horizontal=True)
    left, top = row_labels.length + 12, 34 if title else 10
    body = Bbox.from_bounds(left, top, width * len(columns), height * len(rows))
    canvas = Canvas(body.x1 + 96, body.y1 + max(column_labels.length, LINE) + 14)
    canvas.add_image(_colours(shares, known), body)
    for row, label in row_labels.shown():
        canvas.add_text(body.x0 - 5, body.y0 + (row + 0.5) * height, label, ha="right", va="center_baseline")
    for column, label in column_labels.shown():
        x = body.x0 + (column + 0.5) * width
        canvas.add_text(x, body.y1 + 5, label, ha="center", va="top", rotation=column_labels.rotation)
    if title:
        canvas.add_text(body.x0, 10, printable(title), va="top", fontsize=11)
    _add_scale(canvas, body, ends, limits is None)
    return canvas.picture


def scaled(
    values: NDArray[np.float64], limits: tuple[float, float] | None = None
) -> tuple[NDArray[np.float64], tuple[float, float] | None]:
    """Return the places of `values` between the ends of the scale, in [0, 1], and the ends.

    Values that are not finite become NaN; if there is no finite value and no limit, there are no ends.

    Examples
    --------
    >>> scaled(np.array([[1.0, 2.0, 3.0]]))
    (array([[0. , 0.5, 1. ]]), (1.0, 3.0))
    >>> scaled(np.array([[0.01, 1.0, 100.0]]))
    (array([[0. , 0.5, 1. ]]), (0.01, 100.0))
    >>> scaled(np.array([[0.01, 1.0, 100.0]]), (0.0, 100.0))[0].round(2)
    array([[0.  , 0.01, 1.  ]])
    """
    values = np.where(np.isfinite(values), bounded(values), math.nan)
    if limits is not None:
        return _shares(values, *limits), limits
    finite = values[~np.isnan(values)]
    if not finite.size:
        return values, None
    low, high = float(finite.min()), float(finite.max())
    # Zeros have no logarithm: they are shown as the least positive value.
    least = float(finite[finite > 0].min()) if low == 0 < high else low
    if is_logarithmic(least, high):
        return _shares(np.log(np.maximum(values, least)), math.log(least), math.log(high)), (least, high)
    return _shares(values, low, high), (low, high)


def _shares(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    return (values - low) / ((high - low) or 1.0)


def _colours(shares: NDArray[np.float64], known: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
    """Return the colours (row, column, 4)."""
    colours: NDArray[np.uint8] = mpl.colormaps["viridis"](shares, bytes=True)
    colours[np.isnan(shares)] = _NONFINITE
    if known is not None:
        colours[~known] = _MISSING
    return colours


def _add_scale(canvas: Canvas, body: Bbox, ends: tuple[float, float] | None, is_automatic: bool) -> None:
    """Add the colours of the scale, with its ends, at the right of the body."""
    x = body.x1 + 14
    if ends is None:
        canvas.add_text(x, body.y0, "not finite", va="top", color="#e6003c")
        return
    canvas.add_image(_colours(np.linspace(1, 0, 256)[:, None]), Bbox.from_extents(x, body.y0, x + 12, body.y1))
    canvas.add_text(x + 17, body.y0, f"{ends[1]:.3g}", va="top")
    canvas.add_text(x + 17, body.y1, f"{ends[0]:.3g}", va="bottom")
    if is_automatic and is_logarithmic(*ends):
        canvas.add_text(x, body.y1 + 5, "log scale", va="top")
