"""Draws a matrix as an image: a heat map of modules by steps, or a matrix of modules by modules."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.image import BboxImage
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox, TransformedBbox
from numpy.typing import NDArray

from ikkuna.plot.figure import NotebookFigure
from ikkuna.visualization.pictures.heatmap import HeatmapView
from ikkuna.visualization.pictures.labels import printable
from ikkuna.visualization.pictures.scale import bounded, is_logarithmic

__all__ = ["draw_heatmap", "draw_matrix", "scaled"]

_NONFINITE = (230, 0, 60, 255)  # a colour that the colour map lacks
_MISSING = (226, 230, 238, 255)
_DPI = 100
_FONT_SIZE = 8
_LINE = 18  # pixels between two labels
_LONGEST = 36  # characters of a label


def draw_heatmap(view: HeatmapView) -> NotebookFigure:
    """Return the picture of a heat map, with a row for each module and a column for each step."""
    columns = [f"step {view.steps[0]}", *map(str, view.steps[1:])]
    return draw_matrix(view.values.astype(np.float64), view.names, columns, known=view.known)


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
    row_labels = _Labels(rows, height)
    column_labels = _Labels(columns, width, is_horizontal=True)
    left, top = row_labels.length + 12, 34 if title else 10
    body = Bbox.from_bounds(left, top, width * len(columns), height * len(rows))
    canvas = _Canvas(body.x1 + 96, body.y1 + max(column_labels.length, _LINE) + 14)
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


class _Labels:
    """The labels of rows or columns, as many as there is space for.

    Parameters
    ----------
    names : sequence of str
        One for each cell.
    size : int
        Pixels from one cell to the next.
    is_horizontal : bool
        Whether the cells stand beside each other; their labels are rotated if they are long.
    """

    def __init__(self, names: Sequence[str], size: int, is_horizontal: bool = False) -> None:
        self._names = names
        is_rotated = is_horizontal and max(map(len, names)) > 15
        self.rotation = 90 if is_rotated else 0
        widths = [_width(label) for _, label in self._every(_LINE / size)]
        needed = max(widths) + 10 if is_horizontal and not is_rotated else _LINE
        self._spacing = needed / size
        self.length = max(widths) if is_rotated or not is_horizontal else _LINE

    def _every(self, spacing: float) -> Iterable[tuple[int, str]]:
        places = range(0, len(self._names), math.ceil(spacing))
        return [(place, printable(self._names[place], _LONGEST)) for place in places]

    def shown(self) -> Iterable[tuple[int, str]]:
        """Return the cells that are labelled, with their labels."""
        return self._every(self._spacing)


def _width(text: str) -> float:
    """Return the width of a label in pixels."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=_FONT_SIZE), ismath=False)
    return float(width) * _DPI / 72


class _Canvas:
    """A picture in which places are given in pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._size = math.ceil(width), math.ceil(height)
        self.picture = NotebookFigure(figsize=(self._size[0] / _DPI, self._size[1] / _DPI), dpi=_DPI)

    def add_image(self, colours: NDArray[np.uint8], place: Bbox) -> None:
        """Add an image (row, column, 4) that fills `place`."""
        width, height = self._size
        share = Bbox.from_extents(place.x0 / width, 1 - place.y1 / height, place.x1 / width, 1 - place.y0 / height)
        image = BboxImage(TransformedBbox(share, self.picture.transFigure), interpolation="nearest")
        image.set_data(colours)
        self.picture.add_artist(image)

    def add_text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Add a text."""
        options = {"fontsize": _FONT_SIZE, "color": "#282828", **options}
        self.picture.text(x / self._size[0], 1 - y / self._size[1], text, parse_math=False, **options)


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


def _add_scale(canvas: _Canvas, body: Bbox, ends: tuple[float, float] | None, is_automatic: bool) -> None:
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
