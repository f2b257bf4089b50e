"""Draws charts: curves and histograms of modules."""

import io
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ikkuna.backends.pictures.cells import is_logarithmic, printable
from ikkuna.backends.pictures.chart import ChartView, HistogramsView
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
_LARGEST_LIMIT = 1e100  # the square of a limit of an axis must not overflow


def escaped(text: str) -> str:
    r"""Return :func:`printable` text that matplotlib shows in titles and legends letter by letter.

    Matplotlib reads a formula between dollar signs, and leaves out of legends what begins with an underscore.

    Examples
    --------
    >>> escaped("a$b$"), escaped("_private")
    ('a\\$b\\$', ' _private')
    """
    shown = printable(text, 44).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def bounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `values`, cut to ±1e100."""
    return np.clip(values, -_LARGEST_LIMIT, _LARGEST_LIMIT)


def encode_figure(picture: Figure, dpi: float = 100.0) -> bytes:
    """Return the picture as PNG, and clear it."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 2})  # 5 times faster than 6
    picture.clear()  # its parts refer to each other, and the user may have disabled the garbage collector
    return buffer.getvalue()


def draw_chart(view: ChartView, order: Order = str) -> NotebookFigure:
    """Return a picture with a line for each module, or with quantiles over all modules.

    Values that are not finite leave gaps, and a corner shows their share.
    The declaration of the kind decides the scale, if no limits are given: shares lie on [0, 1], and what is compared by its logarithm
    is so from a factor of 100 on (:func:`~ikkuna.backends.pictures.cells.is_logarithmic`).

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
    for ax in axes[:: columns or 1]:
        ax.set_ylabel("step")
    style.add_title(picture, "")
    assert isinstance(picture, NotebookFigure)
    return picture
