"""Draws a heat map of modules by steps."""

import math

import numpy as np
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from ikkuna.plot.figure import NotebookFigure
from ikkuna.visualization.pictures.canvas import LINE, Canvas, Labels, text_width
from ikkuna.visualization.pictures.colour_scale import (
    COLOURS,
    MISSING,
    NONFINITE,
    ZERO,
    ColourScale,
    palette,
    scale_type,
)
from ikkuna.visualization.pictures.heatmap import HeatmapView

__all__ = ["draw_heatmap", "grouped"]

_FONT_SIZE = 11  # readable where TensorBoard shrinks the picture to the width of a card
_WIDTH = 400  # pixels of the body, about
_HEIGHT = 260  # pixels of the body, at most: with the legend, about the shape of a card
_MOST_ROWS = 105
_BAR = 120  # pixels of the colour bar
_SPECIAL = ((ZERO, "exactly 0"), (NONFINITE, "NaN or Inf"), (MISSING, "no value"))

Values = NDArray[np.float64]
Known = NDArray[np.bool_]


def draw_heatmap(view: HeatmapView) -> NotebookFigure:
    """Return the picture of a heat map, with a row for each module and a column for each step, and a legend below.

    The kind decides the scale: shares lie on [0, 1], signed numbers symmetrically to 0, all others are logarithmic.
    Zero, numbers that are not finite, and missing values have colours of their own.
    Of more than 105 modules, neighbours share a row, see `grouped`.
    """
    names, values, known = grouped(view)
    scale = ColourScale.of(view.kind, values[known])
    indices = scale.indices(values)
    indices[~known] = MISSING
    colours = _with_alpha(palette(view.kind))
    height = max(2, min(24, _HEIGHT // len(names)))
    width = max(1, round(_WIDTH / len(view.steps)))
    rows = Labels(names, height, font_size=_FONT_SIZE)
    columns = Labels([str(step) for step in view.steps], width, is_horizontal=True, font_size=_FONT_SIZE)
    left = max(rows.length, text_width("step", _FONT_SIZE)) + 12
    body = Bbox.from_bounds(left, 10, width * len(view.steps), height * len(names))
    canvas = Canvas(max(body.x1, left + _WIDTH) + 24, body.y1 + 2 * LINE + 34)
    canvas.add_image(colours[indices], body)
    for row, label in rows.shown():
        y = body.y0 + (row + 0.5) * height
        canvas.add_text(body.x0 - 5, y, label, ha="right", va="center_baseline", fontsize=_FONT_SIZE)
    canvas.add_text(body.x0 - 5, body.y1 + 5, "step", ha="right", va="top", fontsize=_FONT_SIZE)
    for column, label in columns.shown():
        x = body.x0 + (column + 0.5) * width
        canvas.add_text(x, body.y1 + 5, label, ha="center", va="top", fontsize=_FONT_SIZE)
    _add_legend(canvas, body.y1 + LINE + 12, scale, colours, indices)
    return canvas.picture


def _with_alpha(colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([colours, np.full((len(colours), 1), 255, np.uint8)], axis=1)


def _add_legend(
    canvas: Canvas, y: float, scale: ColourScale, colours: NDArray[np.uint8], indices: NDArray[np.uint8]
) -> None:
    """Add a colour bar with its ends, and below it a square for each special colour that occurs."""
    x = 12.0
    ends = (
        f"{'≤ ' if scale.is_cut else ''}{scale.low:.3g}",
        f"{scale.high:.3g}" + (" (log)" if scale.type == "log" else ""),
    )
    canvas.add_text(x, y, ends[0], va="top", fontsize=_FONT_SIZE)
    x += text_width(ends[0], _FONT_SIZE) + 6
    canvas.add_image(colours[np.arange(COLOURS)[None]], Bbox.from_bounds(x, y, _BAR, 12))
    canvas.add_text(x + _BAR + 6, y, ends[1], va="top", fontsize=_FONT_SIZE)
    x, y = 12.0, y + LINE + 4
    for number, text in _SPECIAL:
        if (indices == number).any():
            canvas.add_image(colours[[[number]]], Bbox.from_bounds(x, y, 12, 12))
            canvas.add_text(x + 17, y, text, va="top", fontsize=_FONT_SIZE)
            x += text_width(text, _FONT_SIZE) + 32


def grouped(view: HeatmapView, most: int = _MOST_ROWS) -> tuple[tuple[str, ...], Values, Known]:
    """Return names, values and which of them are known, of at most `most` rows.

    Each row then stands for a group of neighbouring modules: it is NaN if one of them is not finite; otherwise the largest of
    shares, the signed number with the largest magnitude, or the median of other numbers, which is 0 if one of them is 0.

    Examples
    --------
    >>> values = np.array([[1.0], [0.0], [3.0], [5.0]], np.float32)
    >>> names, values, known = grouped(HeatmapView(("a", "b", "c", "d"), (0,), values, np.ones((4, 1), bool), "x_norm2"), 2)
    >>> names, values.tolist()
    (('a … +1', 'c … +1'), [[0.0], [4.0]])
    """
    values = view.values.astype(np.float64)
    if len(view.names) <= most:
        return view.names, values, view.known
    parts = np.array_split(np.arange(len(view.names)), most)
    names = tuple(
        f"{view.names[part[0]]} … +{len(part) - 1}" if len(part) > 1 else view.names[part[0]] for part in parts
    )
    known = np.stack([view.known[part].any(axis=0) for part in parts])
    return names, np.stack([_merged(values[part], view.known[part], scale_type(view.kind)) for part in parts]), known


def _merged(values: Values, known: Known, type_name: str) -> Values:
    broken = (known & ~np.isfinite(values)).any(axis=0)
    there = np.where(known & np.isfinite(values), values, 0.0)
    largest = np.take_along_axis(there, np.abs(there).argmax(axis=0)[None], axis=0)[0]
    if type_name == "log":
        usable = known.any(axis=0) & ~broken
        median = np.zeros(values.shape[1])
        median[usable] = np.nanmedian(np.where(known, values, np.nan)[:, usable], axis=0)
        largest = np.where((known & (values == 0)).any(axis=0), 0.0, median)
    return np.where(broken, math.nan, largest)
