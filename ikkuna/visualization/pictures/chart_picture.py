"""Draws charts: arrays in, a picture out, that belongs to nobody."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ikkuna.plot.annotations import add_note
from ikkuna.plot.curves import draw_curves
from ikkuna.plot.fan import FanSeries, draw_fan
from ikkuna.plot.figure import NotebookFigure, count_nonfinite
from ikkuna.plot.grid import create_panels, grid_shape
from ikkuna.plot.histograms import draw_ridge
from ikkuna.plot.images import draw_image
from ikkuna.plot.style import Style, curve_colors
from ikkuna.visualization.pictures.chart import ChartView, HistogramsView, MatrixView

__all__ = ["draw_chart", "draw_histograms", "draw_matrix", "plain"]

Array = NDArray[np.float64]
Order = Callable[[str], object]
_HUGE = 1e100  # matplotlib's limits overflow beyond its square
_LEAST = 1e-100
_BLUE = "#0072b2"


def draw_chart(view: ChartView, order: Order = str) -> NotebookFigure:
    """Return a picture with a line for each module, or with quantiles over all modules.

    Steps with a value that is not finite are holes, and counted in a corner.
    The scale is logarithmic where values are positive and span more than a factor of 100, unless limits are given.

    Parameters
    ----------
    view : what to draw
    order : what to sort modules by
    """
    style = Style(title=plain(view.title))
    picture = style.new_figure(8.0, 4.5)
    ax = picture.subplots()
    drawn = _draw_quantiles(ax, view) if view.quantiles is not None else _draw_lines(ax, view, order)
    if drawn and (count := count_nonfinite(np.concatenate(drawn))):
        add_note(ax, str(count))
    _scale(ax, drawn, view.ylims)
    ax.set_xlabel("step")
    ax.set_ylabel(plain(view.label))
    ax.grid(alpha=0.25)
    style.add_title(picture, "")
    return picture


def _draw_lines(ax: Axes, view: ChartView, order: Order) -> list[Array]:
    lines = sorted(view.lines, key=lambda line: (line.name is not None, order(line.name or "")))
    for line, color in zip(lines, curve_colors(len(lines)), strict=True):
        marker = "." if len(line.steps) < 3 else None  # a line needs two points
        draw_curves(ax, _bounded(line.values)[:, None], [color], x=line.steps, marker=marker)
    if len(lines) > 1 or (lines and lines[0].name is not None):
        names = [plain(line.name or "network") for line in lines]
        _legend(ax, ax.lines, names)
    return [line.values for line in lines]


def _draw_quantiles(ax: Axes, view: ChartView) -> list[Array]:
    assert view.quantiles is not None
    low, first, median, third, high = np.where(
        np.isfinite(view.quantiles.values), _bounded(view.quantiles.values), math.nan
    )
    draw_fan(ax, FanSeries("*", "", ((low, high), (first, third)), median), view.quantiles.steps, _BLUE)
    middle = Patch(color=_BLUE, alpha=0.36, linewidth=0)  # as both bands look over one another
    names = ["all", "the middle half", "median"]
    _legend(ax, [ax.collections[0], middle, *ax.lines], names, f"{view.modules:,} modules")
    return [view.quantiles.values[0], view.quantiles.values[-1]]


def _legend(ax: Axes, artists: Iterable[Artist], names: Sequence[str], title: str | None = None) -> None:
    ax.legend(artists, names, title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _bounded(values: Array) -> Array:
    return np.clip(values, -_HUGE, _HUGE)


def _scale(ax: Axes, drawn: Sequence[Array], ylims: tuple[float, float] | None) -> None:
    if ylims is not None:
        ax.set_ylim(*ylims)
        return
    values = np.concatenate([*drawn, np.zeros(0)])
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() >= _LEAST and finite.max() > 100 * finite.min():
        ax.set_yscale("log")


def draw_histograms(view: HistogramsView, order: Order = str) -> NotebookFigure:
    """Return a picture with a panel for each module, in which histograms stand behind one another, the latest in front.

    Parameters
    ----------
    view : what to draw
    order : what to sort modules by
    """
    histories = sorted(view.histories, key=lambda history: (history[0] is not None, order(history[0] or "")))
    shown = f", {len(histories)} of {view.modules:,} modules" if view.modules > len(histories) else ""
    style = Style(title=plain(view.title) + shown)
    rows, columns = grid_shape(len(histories))
    picture, axes = create_panels(style, len(histories), rows, False, (3.6 * columns + 0.8, 3.2 * rows + 0.6))
    for ax, (name, histograms) in zip(axes, histories, strict=True):
        draw_ridge(ax, [(f"{row.step}", row.counts, _bounded(row.edges)) for row in histograms])
        ax.set_title(plain(name or "network"), fontsize="medium")
        ax.set_xlabel(plain(view.label))
        if view.ylims is not None:
            ax.set_xlim(*view.ylims)  # values lie along x here
    for ax in axes[::columns]:
        ax.set_ylabel("step")
    style.add_title(picture, "")
    assert isinstance(picture, NotebookFigure)
    return picture


def draw_matrix(view: MatrixView) -> NotebookFigure:
    """Return a picture of a matrix, its first row on top, with the names of rows and columns."""
    matrix = view.matrix
    style = Style(title=f"{plain(view.title)}, step {view.step}")
    picture = style.new_figure(8.0, 4.5)
    ax = picture.subplots()
    low, high = matrix.limits or (None, None)
    image = draw_image(ax, matrix.values, low, high, cmap="viridis", aspect="equal")
    picture.colorbar(image, ax=ax)
    ax.set_xticks(range(len(matrix.columns)), map(plain, matrix.columns), rotation=90, fontsize=8)
    ax.set_yticks(range(len(matrix.rows)), map(plain, matrix.rows), fontsize=8)
    style.add_title(picture, "")
    return picture


def plain(text: str, limit: int = 44) -> str:
    r"""Return `text` as matplotlib shows it letter by letter: no formula, no control character, no missing glyph, not too long.

    Examples
    --------
    >>> plain("a$b$"), plain("_private"), plain("two\nlines")
    ('a\\$b\\$', ' _private', 'two·lines')
    """
    text = text if len(text) <= limit else f"…{text[1 - limit :]}"
    known = _glyphs()
    shown = "".join(c if c.isprintable() and ord(c) in known else "·" for c in text)
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown  # a legend passes over what begins with an underscore


@cache
def _glyphs() -> frozenset[int]:
    """Return what matplotlib's own font can show; the user's may show more, but less would be told in a warning."""
    path = font_manager.findfont("DejaVu Sans")
    return frozenset(font_manager.get_font(path).get_charmap())
