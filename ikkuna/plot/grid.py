"""A grid of panels and the limits that its axes share."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NotebookFigure
from ikkuna.plot.style import Style

__all__ = ["create_panels", "grid_shape", "outer_axes", "share_limits", "sharing"]


def grid_shape(count: int, n_rows: int | str | None = None) -> tuple[int, int]:
    """Return the rows and columns of a grid for `count` panels.

    Parameters
    ----------
    count : int
        Number of panels.
    n_rows : int, 'vertical' or None
        Number of rows; ``'vertical'`` means one column.  By default a full grid at most twice as wide as high if there
        is one, otherwise a nearly square grid with empty places.

    Examples
    --------
    >>> grid_shape(6), grid_shape(7), grid_shape(16), grid_shape(6, n_rows=4)
    ((2, 3), (2, 4), (4, 4), (4, 2))
    """
    if n_rows == "vertical":
        return max(count, 1), 1
    if n_rows is not None:
        if not isinstance(n_rows, int) or n_rows < 1:
            raise ConfigError(f"n_rows must be a positive number, 'vertical' or None, got {n_rows!r}")
        return n_rows, max(math.ceil(count / n_rows), 1)
    root = max(math.isqrt(count), 1)
    for rows in range(root, 0, -1):
        if count % rows == 0 and count // rows <= 2 * rows:
            return rows, count // rows
    return root, math.ceil(count / root)


def sharing(share_xy: Any) -> tuple[Any, Any]:
    """Return how x and y are shared, from one value or a pair of True, False, 'row', 'col'."""
    pair = share_xy if isinstance(share_xy, tuple | list) else (share_xy, share_xy)
    if len(pair) != 2 or any(v not in (True, False, "row", "col", "all", "none") for v in pair):
        raise ConfigError(f"share_xy must be True, False, 'row', 'col' or a pair of them, got {share_xy!r}")
    words = {"all": True, "none": False}
    x, y = (words.get(v, v) if isinstance(v, str) else bool(v) for v in pair)
    return x, y


def create_panels(
    style: Style,
    count: int,
    n_rows: int | str | None = None,
    share_xy: Any = True,
    size: tuple[float, float] | None = None,
    fig: Any = None,
) -> tuple[Any, list[Axes]]:
    """Return a figure with a grid, and the `count` axes to draw into; the other places are hidden."""
    rows, columns = grid_shape(count, n_rows)
    size = size or ((10.0, 5.0) if count == 1 else (10.0, 8.0))
    figure: Any = style.new_figure(*size, panels=rows * columns) if fig is None else fig
    x, y = sharing(share_xy)
    # The sharing of matplotlib takes minutes for hundreds of panels; share_limits() replaces it.
    axes: Any = figure.subplots(rows, columns, squeeze=False, **style.config("subplot"))
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    if style.tight:
        top = 0.94 if style.title else 1.0
        adjust = {"left": 0.0, "right": 1.0, "bottom": 0.0, "top": top, "wspace": 0.0, "hspace": 0.0}
        figure.subplots_adjust(**style.config("tight", **adjust))
    elif isinstance(figure, NotebookFigure) and figure.get_layout_engine() is None:
        gap = 0.12 if count <= 100 else 0.04
        gaps = {"wspace": gap if y else 0.4, "hspace": gap if x else 0.4}
        adjust = {"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.94, **gaps}
        figure.subplots_adjust(**style.config("tight", **adjust))
    if count > 16:
        _shrink_ticks(axes.flat[:count], 6 if count > 36 else 8)
    return figure, list(np.asarray(axes).flat[:count])


def _shrink_ticks(axes: Any, size: int) -> None:
    """Use small tick labels in a large grid, at most three for each axis."""
    for ax in axes:
        ax.tick_params(labelsize=size, pad=1.5, length=2)
        ax.locator_params(nbins=3, prune="both")


def share_limits(axes: list[Axes], columns: int, share_xy: Any) -> None:
    """Set common limits for the panels of a grid, and remove tick labels that repeat those of an outer panel.

    Call this function when everything is drawn.
    """
    bottom, left = (set(map(id, edge)) for edge in outer_axes(axes, columns))
    if len(axes) > 100:  # neighbouring labels would overlap
        bottom = {id(axes[-1])}
    for name, how, edge, along in zip("xy", sharing(share_xy), (bottom, left), ("col", "row"), strict=True):
        for group in _groups(axes, columns, how):
            _equate(group, name)
        for ax in axes if how in (True, along) else ():
            if id(ax) not in edge:
                ax.tick_params(axis=name, **{"labelbottom" if name == "x" else "labelleft": False})  # type: ignore[arg-type]


def _groups(axes: list[Axes], columns: int, how: Any) -> list[list[Axes]]:
    if how == "row":
        return [axes[i : i + columns] for i in range(0, len(axes), columns)]
    if how == "col":
        return [axes[i::columns] for i in range(columns)]
    return [axes] if how else []


def _equate(axes: list[Axes], name: str) -> None:
    limits = [getattr(ax, f"get_{name}lim")() for ax in axes]
    low, high = min(map(min, limits)), max(map(max, limits))
    for ax, (first, last) in zip(axes, limits, strict=True):
        getattr(ax, f"set_{name}lim")((high, low) if first > last else (low, high))


def outer_axes(axes: list[Axes], columns: int) -> tuple[list[Axes], list[Axes]]:
    """Return the axes at the bottom of the columns and the axes at the left of the rows."""
    bottom = [ax for i, ax in enumerate(axes) if i + columns >= len(axes)]
    return bottom, axes[::columns]
