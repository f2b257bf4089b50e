"""Histograms: a grid or a table of them, and one with its highest bins cut off."""

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.figures.style import (
    NOTE_COLOR,
    Style,
    StyleOptions,
    accepts_style,
    add_note,
    count_nonfinite,
    create_panels,
    curve_colors,
    grid_shape,
    label_panel,
    share_limits,
)
from ikkuna.numerics.elements import to_array

Array = NDArray[np.float64]


def draw_histogram(ax: Axes, values: Array, bins: Any = 100, **options: Any) -> Array:
    """Draw a histogram of the finite elements of `values` into `ax`, return the counts, and note NaN and Inf."""
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins, options.pop("range", None), density=options.pop("density", False))
    ax.stairs(counts, edges, **{"fill": True, "color": "#0072b2", **options})
    if count := count_nonfinite(values):
        add_note(ax, str(count))
    return counts.astype(np.float64)


def draw_ridge(
    ax: Axes, rows: Sequence[tuple[str, Array, Array]], color: Any = "#0072b2", overlap: float = 1.6
) -> Axes:
    """Draw overlapping histograms (a ridgeline plot), the first one on top.

    Parameters
    ----------
    ax : Axes
        The axes to draw into.
    rows : sequence of tuple
        (name, counts, edges) for each histogram; each one is scaled to the same height.
    color : str or tuple
        Colour of the histograms.
    overlap : float
        Height of a histogram, in rows.
    """
    for i, (_, counts, edges) in enumerate(rows):
        base = len(rows) - 1 - i
        top = float(np.max(counts, initial=0.0)) or 1.0
        heights = np.asarray(counts) / top * overlap
        ax.stairs(base + heights, edges, baseline=base, fill=True, color=color, alpha=0.75, zorder=2 * i)
        ax.stairs(base + heights, edges, baseline=base, color="white", linewidth=0.8, zorder=2 * i + 1)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    ax.set_ylim(-0.1, len(rows) - 1 + overlap + 0.1)
    return ax


@accepts_style(annotations="labels", colnames="column_names", side_annot="row_name")
def features_hist(
    data: Any,
    *,
    layout: str | None = None,
    n_rows: Any = "vertical",
    bins: Any = 100,
    xlims: Any = None,
    ylim: Any = None,
    center_zero: bool = False,
    share_xy: Any = ("col", True),
    labels: Any = "auto",
    column_names: Sequence[str] = (),
    row_name: str | None = None,
    peaks_to_clip: int = 0,
    pad_xticks: bool = False,
    color: Any = None,
    fig: Any = None,
    **style_options: Unpack[StyleOptions],
) -> Any:
    """Draw a histogram of each entry of `data`.

    Parameters
    ----------
    data : sequence
        Each entry has one panel for all its elements; entries may differ in shape.  In a table, each entry is a row of
        cells; a cell is one array, or several arrays that are drawn over one another.
    layout : {'vertical', 'grid', 'table'}, optional
        One column of panels (the default), a nearly square grid, or a table.
    n_rows : int, 'vertical' or None
        Rows of the grid.
    bins : int or sequence of float
        Number of bins, or their edges.
    xlims, ylim : tuple of float, optional
        Limits of the axes.
    center_zero : bool
        Make x symmetric about 0; overrides `xlims`.
    share_xy : bool, str or tuple of them
        As for :func:`~ikkuna.figures.curves.features_1d`.
    labels : 'auto', list of str or None
        Texts in the corners of the panels; ``'auto'`` means their indices.
    column_names : sequence of str
        Names above the columns of a table.
    row_name : str, optional
        Word at the right of each row of a table, followed by the index of the row.
    peaks_to_clip : int
        Cut off this number of the highest bins (see :func:`hist_clipped`).
    pad_xticks : bool
        Write the limits of x into the panel instead of ticks.
    color : str, tuple or list of them, optional
        One colour, or a list for the histograms of a cell.
    fig : Figure, optional
        Figure for the grid; a new one by default.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    NotebookFigure
        Or `fig`.

    Examples
    --------
    >>> figure = features_hist([[1.0, 2.0, 2.0], [5.0]], bins=3)
    >>> [float(ax.patches[0].get_data().values.sum()) for ax in figure.axes]
    [3.0, 1.0]
    """
    table = _table(data, layout)
    columns = len(table[0])
    cells = [cell for row in table for cell in row]
    style = Style.of(style_options)
    rows: Any = len(table) if layout == "table" else None if layout == "grid" else n_rows
    size = (4.0 * max(columns, 2), 10.0) if layout == "table" else (10.0, 10.0)
    figure, axes = create_panels(style, len(cells), rows, share_xy, size, fig)
    for i, (ax, cell) in enumerate(zip(axes, cells, strict=True)):
        _draw_cell(ax, cell, bins, peaks_to_clip, curve_colors(len(cell), color), style)
        _set_limits(ax, cell, xlims, ylim, center_zero)
        style.format_panel(ax)
        if layout != "table":
            label_panel(ax, i, labels, len(cells), style)
    share_limits(axes, columns if layout == "table" else grid_shape(len(cells), rows)[1], share_xy)
    if layout == "table":
        _name_table(axes, columns, column_names, row_name)
    for ax in axes if pad_xticks else ():
        _write_limits(ax, style)
    axes[-1].set_xlabel("value")
    axes[len(axes) // 2].set_ylabel("number of elements")
    style.add_title(figure, "a histogram for each entry")
    style.finish([figure], {f"panel {i}": count_nonfinite(np.concatenate(cell)) for i, cell in enumerate(cells)})
    return figure


def features_hist_v2(data: Any, colnames: Sequence[str] = (), **options: Any) -> Any:
    """Return :func:`features_hist` with the layout ``'table'``."""
    return features_hist(data, layout="table", column_names=colnames or (), **options)


def _table(data: Any, layout: str | None) -> list[list[list[Array]]]:
    """Return rows of cells of flat arrays."""
    if layout not in (None, "vertical", "grid", "table"):
        raise ConfigError(f"layout must be 'vertical', 'grid' or 'table', got {layout!r}")
    depth = 2 if layout == "table" else 1
    if isinstance(data, Tensor | np.ndarray) and data.ndim < depth:
        raise ConfigError(f"features_hist needs data of {depth} or more axes here, got shape {tuple(data.shape)}")
    if layout != "table":
        table = [[[to_array(entry).reshape(-1)]] for entry in data]
    else:
        table = [[_cell(cell) for cell in row] for row in data]
    if not table or not table[0] or not all(cell for row in table for cell in row):
        raise ConfigError("there is no data to draw: expected at least one non-empty entry")
    if len({len(row) for row in table}) > 1:
        raise ConfigError(f"every row of a table needs the same number of cells, got {[len(row) for row in table]}")
    return table


def _cell(cell: Any) -> list[Array]:
    """Return the arrays of a cell; plain numbers are one array."""
    parts = [to_array(part).reshape(-1) for part in cell]
    numbers = parts and not any(np.ndim(part) for part in cell)
    return [np.concatenate(parts)] if numbers else parts


def _draw_cell(ax: Axes, cell: list[Array], bins: Any, peaks: int, colors: list[Any], style: Style) -> None:
    finite = np.concatenate([part[np.isfinite(part)] for part in cell])
    edges = np.histogram_bin_edges(finite, bins)
    alpha = 1.0 if len(cell) == 1 else 0.6
    counts = [
        draw_histogram(ax, part, edges, **style.config("plot", color=c, alpha=alpha))
        for part, c in zip(cell, colors, strict=True)
    ]
    if peaks:
        _clip(ax, counts[0], edges, peaks, {})


def _set_limits(ax: Axes, cell: list[Array], xlims: Any, ylim: Any, center_zero: bool) -> None:
    if center_zero:
        finite = np.concatenate([part[np.isfinite(part)] for part in cell])
        top = max(float(np.abs(finite).max(initial=0.0)), *(abs(limit) for limit in ax.get_xlim()))
        xlims = (-top, top)
    if xlims is not None:
        ax.set_xlim(*xlims)
    if ylim is not None:
        ax.set_ylim(*ylim)


def _write_limits(ax: Axes, style: Style) -> None:
    low, high = ax.get_xlim()
    ax.tick_params(axis="x", labelbottom=False, bottom=False)
    font = style.config("pad_xticks", fontsize=8, va="bottom", transform=ax.transAxes)
    ax.text(0.01, 0.02, f"{low:.3g}", ha="left", **font)
    ax.text(0.99, 0.02, f"{high:.3g}", ha="right", **font)


def _name_table(axes: list[Axes], columns: int, names: Sequence[str], row_name: str | None) -> None:
    for ax, name in zip(axes[:columns], names, strict=False):
        ax.set_title(name)
    if row_name is not None:
        for i, ax in enumerate(axes[columns - 1 :: columns]):
            ax.annotate(f"{row_name}{i}", (1.02, 0.5), xycoords="axes fraction", va="center", weight="bold")


def hist_clipped(
    data: Any, peaks_to_clip: int = 1, ax: Axes | None = None, annot_kw: Any = (), bins: Any = 100, **options: Any
) -> tuple[Axes, list[tuple[float, int]]]:
    """Draw a histogram whose highest bins are cut off, so that the other bins are visible.

    The y-axis ends 5 % above the highest bin that is not cut off.
    The panel lists a line ``(left edge, count)`` for each bin that is cut off.

    Parameters
    ----------
    data : Tensor, ndarray or list
        The elements to count.
    peaks_to_clip : int
        Number of bins to cut off.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    annot_kw : mapping or None
        Options of the text; ``None`` means no text.
    bins : int or sequence of float
        Number of bins, or their edges.
    **options
        Options of the artist.

    Returns
    -------
    ax : Axes
        The axes with the histogram.
    clipped : list of tuple
        (left edge, count) of each bin that is cut off.

    Raises
    ------
    ConfigError
        If `peaks_to_clip` is not less than the number of bins.

    Examples
    --------
    >>> ax, clipped = hist_clipped([0.0] * 1000 + [1.0] * 10 + [2.0] * 5, bins=3)
    >>> clipped, round(float(ax.get_ylim()[1]), 6)
    ([(0.0, 1000)], 10.5)
    """
    values = to_array(data).reshape(-1)
    axes: Axes = ax if ax is not None else Style().new_figure(8, 4).subplots()
    edges = np.histogram_bin_edges(values[np.isfinite(values)], bins)
    counts = draw_histogram(axes, values, edges, **options)
    axes.set(xlabel="value", ylabel="number of elements")
    return axes, _clip(axes, counts, edges, peaks_to_clip, annot_kw)


def _clip(ax: Axes, counts: Array, edges: Array, peaks: int, annot_kw: Any) -> list[tuple[float, int]]:
    if not 0 <= peaks < len(counts):
        raise ConfigError(f"peaks_to_clip must be less than the number of bins, {len(counts)}, got {peaks}")
    order = np.argsort(-counts, kind="stable")
    ax.set_ylim(0, 1.05 * max(counts[order[peaks]], 1e-12))
    clipped = [(float(edges[i]), int(counts[i])) for i in order[:peaks]]
    if clipped and annot_kw is not None:
        text = "\n".join(f"({left:.2f}, {count})" for left, count in clipped)
        font = {"color": NOTE_COLOR, "weight": "bold", "ha": "left", "va": "top", "transform": ax.transAxes}
        ax.text(0.05, 0.95, text, **{**font, **dict(annot_kw)})
    return clipped
