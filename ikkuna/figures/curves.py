"""Channels as points, curves and fans of percentiles over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.figures.style import (
    NOTE_COLOR,
    Style,
    StyleOptions,
    accepts_style,
    add_color_legend,
    add_note,
    add_outer_legend,
    count_nonfinite,
    create_panels,
    curve_colors,
    grid_shape,
    label_outer_axes,
    label_panel,
    share_limits,
)
from ikkuna.numerics.elements import to_array
from ikkuna.numerics.statistics.histogram import SIGMA


@accepts_style(show_y_zero="zero_line", y_zero="zero_line", ylims="ylim")
def features_0d(
    data: Any,
    *,
    marker: str = "o",
    cmap: Any = None,
    color: Any = None,
    zero_line: bool = True,
    ylim: Any = "auto",
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Axes:
    """Draw the value of every channel as a point, a column of points for each sample.

    Parameters
    ----------
    data : Tensor, ndarray or list
        (sample, channel), such as the gradient of a last state.
    marker : str
        Marker of the points.
    cmap : str or Colormap, optional
        Colour map for the channels; a channel has the same colour in all samples.
    color : str, tuple or list of them, optional
        One colour for all channels, or a list of colours.
    zero_line : bool
        Draw a line at 0.
    ylim : 'auto' or tuple of float
        Limits of y; ``'auto'`` means the largest magnitude on both sides of 0.
    ax : Axes, optional
        Axes to draw into; by default those of a new figure.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    Axes
        The axes with the points.

    Raises
    ------
    ConfigError
        If the data is not 2-D.

    Examples
    --------
    >>> [float(limit) for limit in features_0d([[1.0, -2.0], [0.5, 1.0]]).get_ylim()]
    [-2.0, 2.0]
    """
    values = to_array(data)
    if values.ndim != 2:
        raise ConfigError(f"features_0d expects 2-D data (sample, channel), got shape {values.shape}")
    style = Style.of(style_options, borders=False)
    figure = style.new_figure(12, 4) if ax is None else None
    target: Axes = ax if ax is not None else figure.subplots()  # type: ignore[union-attr]  # either ax or figure is not None
    draw_points(target, values, curve_colors(values.shape[1], color, cmap), **style.config("plot", marker=marker))
    if zero_line:
        target.axhline(0, color="black", linewidth=1, zorder=0)
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max(initial=0.0)) or 1.0
    target.set_ylim(*((-top, top) if isinstance(ylim, str) else ylim))
    target.set_xticks(np.arange(1, len(values) + 1), minor=True)
    target.set(xlabel="sample", ylabel="value", xlim=(0.25, len(values) + 0.75))
    style.format_panel(target)
    style.add_title(target, "a column of channels for each sample")
    add_color_legend(target, values.shape[1], "channel", color, cmap)
    if count := count_nonfinite(values):
        add_note(target, str(count))
    if figure is not None:
        style.finish([figure], {"data": count})
    return target


def draw_points(ax: Axes, values: NDArray[np.float64], colors: list[Any], **options: Any) -> Axes:
    """Draw `values`: (sample, channel) into `ax`, a column of points for each sample."""
    x = np.arange(1, len(values) + 1)
    for channel, color in enumerate(colors):
        ax.scatter(x, values[:, channel], color=color, **{"s": 18, "clip_on": False, **options})
    return ax


@accepts_style(show_y_zero="zero_line", y_zero="zero_line", annotations="labels", max_timesteps="max_steps")
def features_1d(
    data: Any,
    *,
    by: str = "channel",
    n_rows: int | str | None = None,
    share_xy: Any = True,
    zero_line: bool = False,
    labels: Any = "auto",
    max_steps: int | None = None,
    subplot_samples: bool = False,
    color: Any = None,
    cmap: Any = None,
    fig: Any = None,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Any:
    """Draw channels as curves over time, a panel for each channel and a curve for each sample.

    Parameters
    ----------
    data : Tensor, ndarray or list
        (sample, time, channel), or (time, channel) for one panel with all channels.
    by : {'channel', 'sample'}
        Draw a panel for each channel or for each sample; the other one has the curves.  ``subplot_samples=True`` means
        ``'sample'``.
    n_rows : int, optional
        Rows of panels.
    share_xy : bool, str or tuple of them
        Whether panels have the same limits of x and y: True, False, ``'row'``, ``'col'`` or a pair of these.
    zero_line : bool
        Draw a line at 0.
    labels : 'auto', list of str or None
        Texts in the corners of the panels; ``'auto'`` means their indices.
    max_steps : int, optional
        Draw only this number of steps.
    subplot_samples : bool
        See `by`.
    color : str, tuple or list of them, optional
        One colour for all curves, or a list of colours.
    cmap : str or Colormap, optional
        Colour map for the curves.
    fig : Figure, optional
        Figure for the grid; a new one by default.
    ax : Axes, optional
        Axes for a single panel.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    NotebookFigure
        Or `fig`, or the figure of `ax`.

    Raises
    ------
    ConfigError
        If the data has another number of axes, or if `by` has another value.

    Examples
    --------
    >>> figure = features_1d(np.zeros((3, 10, 4)))
    >>> [len(ax.lines) for ax in figure.axes]
    [3, 3, 3, 3]
    """
    values, curve, panel = _curves(data, "sample" if subplot_samples else by, max_steps)
    style = Style.of(style_options)
    target: Any = ax.figure if ax is not None else fig
    if ax is not None and len(values) > 1:
        raise ConfigError(f"ax takes one panel, but the data has {len(values)}; give fig")
    columns = grid_shape(len(values), n_rows)[1]
    figure, axes = (target, [ax]) if ax is not None else create_panels(style, len(values), n_rows, share_xy, fig=fig)
    colors = curve_colors(values.shape[2], color, cmap)
    for i, each in enumerate(axes):
        draw_curves(each, values[i], colors, zero_line, **style.config("plot"))
        style.format_panel(each)
        if panel:
            label_panel(each, i, labels, len(values), style)
        if count := count_nonfinite(values[i]):
            add_note(each, str(count))
    share_limits(axes, columns, share_xy)
    label_outer_axes(axes, columns, "timestep", "value")
    style.add_title(
        figure, f"a panel for each {panel}, a curve for each {curve}" if panel else f"a curve for each {curve}"
    )
    if not panel:
        add_color_legend(axes[0], values.shape[2], curve, color, cmap)
    style.finish([figure], {f"{panel or 'data'} {i}": count_nonfinite(v) for i, v in enumerate(values)})
    return figure


def _curves(data: Any, by: str, max_steps: int | None) -> tuple[NDArray[np.float64], str, str]:
    """Return values (panel, time, curve), and the words for a curve and for a panel (empty for a single panel)."""
    if by not in ("channel", "sample"):
        raise ConfigError(f"by must be 'channel' or 'sample', got {by!r}")
    values = to_array(data)
    values = values[:, None] if values.ndim == 1 else values
    if values.ndim not in (2, 3):
        raise ConfigError(f"features_1d expects (sample, time, channel) or (time, channel), got shape {values.shape}")
    if 0 in values.shape:
        raise ConfigError(f"there is no data to draw in shape {values.shape}")
    values = values[..., :max_steps, :]
    if values.ndim == 2:
        return values[None], "channel", ""
    if by == "sample":
        return values, "channel", "sample"
    return values.transpose(2, 1, 0), "sample", "channel"


def draw_curves(
    ax: Axes, values: NDArray[np.float64], colors: list[Any], zero_line: bool = False, x: Any = None, **options: Any
) -> Axes:
    """Draw `values`: (time, curve) into `ax`; NaN leaves a gap."""
    if zero_line:
        ax.axhline(0, color=NOTE_COLOR, linewidth=1)
    steps = np.arange(len(values)) if x is None else x
    width = 1.2 if values.shape[1] <= 16 else 0.6
    shown = np.where(np.isfinite(values), values, np.nan)
    for i, color in enumerate(colors):
        ax.plot(steps, shown[:, i], color=color, **{"linewidth": width, **options})
    if x is None:
        ax.set_xlim(0, len(values))
    return ax


Array = NDArray[np.float64]
_ALPHA = 0.2
COLUMNS = {
    ("weight", "data"): "Weights",
    ("bias", "data"): "Biases",
    ("weight", "grad"): "Weight Gradients",
    ("bias", "grad"): "Bias Gradients",
}


@dataclass(frozen=True)
class FanSeries:
    """The bands and the median of one panel.

    Parameters
    ----------
    layer : str
        Name of the layer; ``'*'`` for the whole model.
    column : str
        Name of the column, such as ``'Weight Gradients'``.
    bands : tuple of tuple
        (low, high) for each band, from the outermost to the innermost, each (entry,).
    median : ndarray
        (entry,).
    """

    layer: str
    column: str
    bands: tuple[tuple[Array, Array], ...]
    median: Array


def fan_series(log: Sequence[Mapping[str, float]]) -> list[FanSeries]:
    """Return the fans in a log of results of the functions of :mod:`ikkuna.monitor`.

    Parameters
    ----------
    log : sequence of mapping
        An entry for each moment, with keys ``{model}/{layer}/{param}/{attr}/{statistic}``.  Missing values become NaN.

    Returns
    -------
    list of FanSeries
        In the order of their first appearance.

    Raises
    ------
    ConfigError
        If no key of the log has such a name.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for entry in log:
        for key in entry:
            parsed = _parse(key)
            if parsed is not None:
                groups.setdefault(parsed[:2], {}).setdefault(parsed[2], key)
    if not groups:
        raise ConfigError("the log has no keys like {model}/{layer}/{param}/{attr}/min, …/max and …/percentile/{i}")
    return [_collect(log, layer, column, keys) for (layer, column), keys in groups.items()]


def _parse(key: str) -> tuple[str, str, str] | None:
    parts = key.split("/")
    tail = 2 if len(parts) > 2 and parts[-2] == "percentile" else 1
    if len(parts) < 4 + tail or (tail == 1 and parts[-1] not in ("min", "max")):
        return None
    param, attr = parts[-tail - 2], parts[-tail - 1]
    param = {"W": "weight", "b": "bias"}.get(param, param)
    column = COLUMNS.get((param, attr), f"{param} {attr}")
    return "/".join(parts[1 : -tail - 2]), column, "/".join(parts[-tail:])


def _collect(log: Sequence[Mapping[str, float]], layer: str, column: str, keys: Mapping[str, str]) -> FanSeries:
    def series(statistic: str) -> Array:
        return np.array([float(entry.get(keys.get(statistic, ""), np.nan)) for entry in log])

    cuts = sorted(int(name.split("/")[1]) for name in keys if name.startswith("percentile/"))
    pairs = [(series("min"), series("max"))] if {"min", "max"} <= set(keys) else []
    half = len(cuts) // 2
    pairs += [
        (series(f"percentile/{a}"), series(f"percentile/{b}")) for a, b in zip(cuts[:half], cuts[::-1], strict=False)
    ]
    median = series(f"percentile/{cuts[half]}") if len(cuts) % 2 else np.full(len(log), np.nan)
    return FanSeries(layer, column, tuple(pairs), median)


def draw_fan(ax: Axes, series: FanSeries, x: Any = None, color: Any = "#0072b2", **options: Any) -> Axes:
    """Draw nested transparent bands and the median into `ax`; NaN leaves a gap."""
    steps = np.arange(len(series.median)) if x is None else x
    for low, high in series.bands:
        ax.fill_between(steps, low, high, color=color, **{"alpha": _ALPHA, "linewidth": 0, **options})
    ax.plot(steps, series.median, color=color, linewidth=1)
    return ax


@accepts_style()
def percentile_fan(
    log: Any,
    *,
    layers: Sequence[str] | None = None,
    params: Sequence[str] | None = None,
    x: Any = None,
    xlabel: str = "Epochs",
    color: Any = "#0072b2",
    percentiles: Sequence[float] = SIGMA,
    ax: Axes | None = None,
    **style_options: Unpack[StyleOptions],
) -> Any:
    """Draw minimum, maximum and percentiles over time.

    There is a row for each layer, with weights, biases and their gradients side by side.
    The four bands contain all elements and those within 3, 2 and 1 standard deviations of a normal distribution.
    A legend beside the panels names the bands.

    Parameters
    ----------
    log : sequence of mapping or FanSeries
        See :func:`fan_series`.
    layers, params : sequence of str, optional
        Rows and columns (such as ``'Weights'``) to draw, in this order.
    x : sequence of float, optional
        Positions of the entries; their index by default.
    xlabel : str
        Label of the x-axis.
    color : str or tuple
        Colour of bands and median.
    percentiles : sequence of float
        The percentiles that the log contains, which the legend names; by default those of :mod:`ikkuna.monitor`.
    ax : Axes, optional
        Axes for a single fan.
    **style_options
        See :class:`~ikkuna.figures.style.Style`.

    Returns
    -------
    NotebookFigure
        Or the figure of `ax`.

    Raises
    ------
    ConfigError
        If the log contains no such statistics, if `x` has another length, or if `ax` is given for several fans.
    KeyError
        If a layer or column is not in the log.
    """
    fans = list(log) if log and isinstance(log[0], FanSeries) else fan_series(log)
    rows = list(dict.fromkeys(fan.layer for fan in fans)) if layers is None else list(layers)
    order = [*COLUMNS.values(), *(fan.column for fan in fans)]
    present = {fan.column for fan in fans}
    columns = [c for c in dict.fromkeys(order) if c in present] if params is None else list(params)
    by_panel = {(fan.layer, fan.column): fan for fan in fans}
    _check(rows, {fan.layer for fan in fans}, "layer")
    _check(columns, present, "column")
    if x is not None and len(x) != len(fans[0].median):
        raise ConfigError(f"x needs a position for each of the {len(fans[0].median)} entries of the log, got {len(x)}")
    style = Style.of(style_options, title=None)
    if ax is not None:
        if len(rows) * len(columns) > 1:
            raise ConfigError(
                f"ax takes one fan, but there are {len(rows) * len(columns)}; select one with layers and params"
            )
        draw_fan(ax, by_panel[rows[0], columns[0]], x, color, **style.config("plot"))
        _add_legend(ax, by_panel[rows[0], columns[0]], percentiles, color, style)
        return ax.figure
    figure = style.new_figure(3.2 * len(columns) + 2.0, 2.2 * len(rows) + 0.5, len(rows) * len(columns))
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, **style.config("subplot"))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            _draw_panel(axes[i, j], by_panel.get((row, column)), x, color, style)
        axes[i, 0].set_ylabel("all layers" if row == "*" else row, weight="bold")
    for j, column in enumerate(columns):
        axes[0, j].set_title(column)
        axes[-1, j].set_xlabel(xlabel)
    _add_legend(axes[0, -1], fans[0], percentiles, color, style)
    style.add_title(figure, "minimum, maximum and percentiles")
    style.finish([figure])
    return figure


def _draw_panel(ax: Axes, fan: FanSeries | None, x: Any, color: Any, style: Style) -> None:
    if fan is None:
        ax.set_visible(False)
        return
    draw_fan(ax, fan, x, color, **style.config("plot"))
    style.format_panel(ax)


def _add_legend(ax: Axes, fan: FanSeries, percentiles: Sequence[float], color: Any, style: Style) -> None:
    """Name the bands in the colours in which they overlap, and the median."""
    alpha = style.config("plot", alpha=_ALPHA)["alpha"]
    bands = [Patch(color=color, alpha=1 - (1 - alpha) ** (i + 1), linewidth=0) for i in range(len(fan.bands))]
    half = len(percentiles) // 2
    names = [f"{a:.3g} % to {b:.3g} %" for a, b in zip(percentiles[:half], percentiles[::-1], strict=False)]
    names = ["minimum to maximum", *names][-len(bands) :]
    middle = [f"{percentiles[half]:.3g} %" if percentiles[half] != 50 else "median"] if len(percentiles) % 2 else []
    if len(bands) - half not in (0, 1):  # the log has other percentiles
        names, middle = [f"band {i + 1}" for i in range(len(bands))], []
    add_outer_legend(ax, [*bands, *ax.lines[: len(middle)]], [*names, *middle])


def _check(names: Sequence[str], known: set[str], word: str) -> None:
    for name in names:
        if name not in known:
            raise KeyError(f"no {word} {name!r} in the log; available: {', '.join(sorted(known))}")
