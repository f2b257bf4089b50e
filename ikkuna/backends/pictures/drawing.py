"""Draws charts, heat maps and matrices."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from ikkuna.backends.pictures.canvas import (
    COLOURS,
    LINE,
    MISSING,
    NONFINITE,
    ZERO,
    Canvas,
    ColourScale,
    Labels,
    bounded,
    escaped,
    is_logarithmic,
    palette,
    printable,
    text_width,
)
from ikkuna.backends.pictures.chart import ChartView, HistogramsView
from ikkuna.backends.pictures.heatmap import HeatmapView
from ikkuna.figures.curves import FanSeries, draw_curves, draw_fan
from ikkuna.figures.histograms import draw_ridge
from ikkuna.figures.style import (
    NotebookFigure,
    Style,
    add_note,
    add_outer_legend,
    count_nonfinite,
    create_panels,
    curve_colors,
    grid_shape,
)
from ikkuna.store.quantity import Quantity

Array = NDArray[np.float64]
Order = Callable[[str], object]
_BLUE = "#0072b2"


def draw_chart(view: ChartView, order: Order = str) -> NotebookFigure:
    """Return a picture with a line for each module, or with quantiles over all modules.

    Values that are not finite leave gaps, and a corner shows their share.
    The declaration of the kind decides the scale, if no limits are given: shares lie on [0, 1], and what is compared by its logarithm
    is so from a factor of 100 on (:func:`~ikkuna.backends.pictures.canvas.is_logarithmic`).

    Parameters
    ----------
    view : ChartView
        The values.
    order : callable
        Returns the sorting key of a module's name.
    """
    style = Style(title=escaped(view.title))
    picture = style.new_figure(8.0, 4.5)
    ax = picture.subplots()
    drawn = _draw_quantiles(ax, view) if view.quantiles is not None else _draw_lines(ax, view, order)
    if drawn and (count := count_nonfinite(np.concatenate(drawn))):
        add_note(ax, str(count))
    _scale(ax, drawn, view.ylims, view.quantity)
    ax.set_xlabel("step")
    ax.set_ylabel(escaped(view.label))
    ax.grid(alpha=0.25)
    style.add_title(picture, "")
    return picture


def _draw_lines(ax: Axes, view: ChartView, order: Order) -> list[Array]:
    lines = sorted(view.lines, key=lambda line: (line.name is not None, order(line.name or "")))
    for line, color in zip(lines, curve_colors(len(lines)), strict=True):
        marker = "." if len(line.steps) < 3 else None  # a line needs two points
        draw_curves(ax, bounded(line.values)[:, None], [color], x=line.steps, marker=marker)
    if len(lines) > 1 or (lines and lines[0].name is not None):
        names = [escaped(line.name or "network") for line in lines]
        add_outer_legend(ax, ax.lines, names)
    return [line.values for line in lines]


def _draw_quantiles(ax: Axes, view: ChartView) -> list[Array]:
    assert view.quantiles is not None
    low, first, median, third, high = np.where(
        np.isfinite(view.quantiles.values), bounded(view.quantiles.values), math.nan
    )
    draw_fan(ax, FanSeries("*", "", ((low, high), (first, third)), median), view.quantiles.steps, _BLUE)
    middle = Patch(color=_BLUE, alpha=0.36, linewidth=0)  # the colour of two overlapping bands
    names = ["minimum to maximum", "25 % to 75 %", "median"]
    add_outer_legend(ax, [ax.collections[0], middle, *ax.lines], names, f"{view.modules:,} modules")
    return [view.quantiles.values[0], view.quantiles.values[-1]]


def _scale(ax: Axes, drawn: Sequence[Array], ylims: tuple[float, float] | None, quantity: Quantity) -> None:
    if ylims is not None:
        ax.set_ylim(*ylims)
        return
    values = np.concatenate([*drawn, np.zeros(0)])
    finite = values[np.isfinite(values)]
    if quantity.scale == "share" and (not finite.size or (finite.min() >= 0 and finite.max() <= 1)):
        ax.set_ylim(-0.02, 1.02)
    elif quantity.scale == "log" and finite.size and is_logarithmic(finite.min(), finite.max()):
        ax.set_yscale("log")


def draw_histograms(view: HistogramsView, order: Order = str) -> NotebookFigure:
    """Return a picture with a panel for each module; its histograms are stacked, the latest at the bottom in front.

    Parameters
    ----------
    view : HistogramsView
        The histograms.
    order : callable
        Returns the sorting key of a module's name.
    """
    histories = sorted(view.histories, key=lambda named: (named[0] is not None, order(named[0] or "")))
    shown = f", {len(histories)} of {view.modules:,} modules" if view.modules > len(histories) else ""
    style = Style(title=escaped(view.title) + shown)
    rows, columns = grid_shape(len(histories))
    picture, axes = create_panels(style, len(histories), rows, False, (3.6 * columns + 0.8, 3.2 * rows + 0.6))
    for ax, (name, histograms) in zip(axes, histories, strict=True):
        draw_ridge(ax, [(f"{one.step}", one.counts, bounded(one.edges)) for one in histograms])
        ax.set_title(escaped(name or "network"), fontsize="medium")
        ax.set_xlabel(escaped(view.label))
        if view.ylims is not None:
            ax.set_xlim(*view.ylims)  # values lie along x here
    for ax in axes[::columns]:
        ax.set_ylabel("step")
    style.add_title(picture, "")
    assert isinstance(picture, NotebookFigure)
    return picture


_WIDTH = 400  # pixels of the body, about
_HEIGHT = 260  # pixels of the body, at most: with the legend, about the shape of a card
_MOST_ROWS = 105
_BAR = 120  # pixels of the colour bar
_SPECIAL = ((ZERO, "exactly 0"), (NONFINITE, "NaN or Inf"), (MISSING, "no value"))

Values = NDArray[np.float64]
Known = NDArray[np.bool_]


def draw_heatmap(view: HeatmapView) -> NotebookFigure:
    """Return the picture of a heat map, with a row for each module and a column for each step, and a legend below.

    The declaration of the kind decides the scale, see `ColourScale`.
    Zero, numbers that are not finite, and missing values have colours of their own.
    Of more than 105 modules, neighbours share a row, see `grouped`.
    """
    names, values, known = grouped(view)
    scale = ColourScale.of(view.quantity, values[known])
    indices = scale.indices(values)
    indices[~known] = MISSING
    cell = max(1, round(_WIDTH / len(view.steps))), max(2, min(24, _HEIGHT // len(names)))
    return _draw_cells(names, [str(step) for step in view.steps], indices, cell, scale, palette(view.quantity), "step")


def draw_matrix(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    limits: tuple[float, float] | None = None,
    title: str = "",
) -> NotebookFigure:
    """Return the picture of a matrix, its first row on top, with a legend below.

    Rows and columns are labelled where there is space.
    Zero and numbers that are not finite have colours of their own, as in a heat map.
    The scale is linear between `limits`; without limits it is logarithmic where :func:`is_logarithmic` says so.

    Parameters
    ----------
    values : ndarray
        (row, column); neither is empty.
    rows, columns : sequence of str
        Names.
    limits : (float, float), optional
        Ends of the scale.
    title : str
        Text above the picture.
    """
    finite = values[np.isfinite(values) & (values != 0)]
    is_log = finite.size and (values[np.isfinite(values)] >= 0).all() and is_logarithmic(finite.min(), finite.max())
    quantity = Quantity(scale="log" if is_log else "linear")
    scale = ColourScale.of(quantity, values) if limits is None else ColourScale("linear", *limits)
    height = max(1, min(24, 420 // len(rows)))
    cell = max(1, max(512, len(rows) * height * 5 // 4) // len(columns)), height
    return _draw_cells(rows, columns, scale.indices(values), cell, scale, palette(quantity), title=title)


def _draw_cells(
    rows: Sequence[str],
    columns: Sequence[str],
    indices: NDArray[np.uint8],
    cell: tuple[int, int],
    scale: ColourScale,
    colours: NDArray[np.uint8],
    corner: str = "",
    title: str = "",
) -> NotebookFigure:
    """Return a picture of cells in colours, of some width and height in pixels, with labels and a legend.

    Texts are never read as formulas: matplotlib's parser of formulas must not run in two threads at a time.
    """
    width, height = cell
    row_labels, column_labels = Labels(rows, height), Labels(columns, width, is_horizontal=True)
    left = max(row_labels.length, text_width(corner)) + 12
    body = Bbox.from_bounds(left, 34 if title else 10, width * len(columns), height * len(rows))
    end = body.y1 + max(column_labels.length, LINE)
    canvas = Canvas(max(body.x1, left + _WIDTH) + 24, end + LINE + 34)
    canvas.add_image(colours[indices], body)
    for row, label in row_labels.shown():
        canvas.add_text(body.x0 - 5, body.y0 + (row + 0.5) * height, label, ha="right", va="center_baseline")
    for column, label in column_labels.shown():
        x = body.x0 + (column + 0.5) * width
        canvas.add_text(x, body.y1 + 5, label, ha="center", va="top", rotation=column_labels.rotation)
    canvas.add_text(body.x0 - 5, body.y1 + 5, corner, ha="right", va="top")
    canvas.add_text(body.x0, 10, printable(title), va="top")
    _add_legend(canvas, end + 12, scale, colours, indices)
    return canvas.picture


def _add_legend(
    canvas: Canvas, y: float, scale: ColourScale, colours: NDArray[np.uint8], indices: NDArray[np.uint8]
) -> None:
    """Add a colour bar with its ends, and below it a square for each special colour that occurs."""
    x = 12.0
    ends = (
        f"{'≤ ' if scale.is_cut else ''}{scale.low:.3g}",
        f"{scale.high:.3g}" + (" (log)" if scale.type == "log" else ""),
    )
    canvas.add_text(x, y, ends[0], va="top")
    x += text_width(ends[0]) + 6
    canvas.add_image(colours[np.arange(COLOURS)[None]], Bbox.from_bounds(x, y, _BAR, 12))
    canvas.add_text(x + _BAR + 6, y, ends[1], va="top")
    x, y = 12.0, y + LINE + 4
    for number, text in _SPECIAL:
        if (indices == number).any():
            canvas.add_image(colours[[[number]]], Bbox.from_bounds(x, y, 12, 12))
            canvas.add_text(x + 17, y, text, va="top")
            x += text_width(text) + 32


def grouped(view: HeatmapView, most: int = _MOST_ROWS) -> tuple[tuple[str, ...], Values, Known]:
    """Return names, values and which of them are known, of at most `most` rows.

    Each row then stands for a group of neighbouring modules: it is NaN if one of them is not finite; otherwise the largest of
    shares, the signed number with the largest magnitude, or the median of other numbers, which is 0 if one of them is 0.

    Examples
    --------
    >>> from ikkuna.store.quantity import Quantity
    >>> values = np.array([[1.0], [0.0], [3.0], [5.0]], np.float32)
    >>> names, values, known = grouped(HeatmapView(("a", "b", "c", "d"), (0,), values, np.ones((4, 1), bool), Quantity(scale="log")), 2)
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
    return names, np.stack([_merged(values[part], view.known[part], view.quantity.scale) for part in parts]), known


def _merged(values: Values, known: Known, type_name: str) -> Values:
    broken = (known & ~np.isfinite(values)).any(axis=0)
    there = np.where(known & np.isfinite(values), values, 0.0)
    largest = np.take_along_axis(there, np.abs(there).argmax(axis=0)[None], axis=0)[0]
    if type_name in ("log", "linear"):
        usable = known.any(axis=0) & ~broken
        median = np.zeros(values.shape[1])
        median[usable] = np.nanmedian(np.where(known, values, np.nan)[:, usable], axis=0)
        largest = np.where((known & (values == 0)).any(axis=0), 0.0, median)
    return np.where(broken, math.nan, largest)
