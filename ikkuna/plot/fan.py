"""Percentiles over time as nested bands: ``percentile_fan``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.numerics.statistics.percentile import SIGMA
from ikkuna.plot.annotations import add_outer_legend
from ikkuna.plot.style import Style, StyleOptions, accepts_style

__all__ = ["FanSeries", "draw_fan", "fan_series", "percentile_fan"]

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
        See :class:`~ikkuna.plot.style.Style`.

    Returns
    -------
    NotebookFigure
        Or the figure of `ax`.

    Raises
    ------
    ConfigError
        If the log contains no such statistics, or if `ax` is given for several fans.
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
    names = ["minimum to maximum", *names][-len(bands) :] if len(bands) <= half + 1 else []
    if len(names) < len(bands):  # the log has other percentiles
        names = [f"band {i + 1}" for i in range(len(bands))]
    middle = (
        [] if len(percentiles) % 2 == 0 else [f"{percentiles[half]:.3g} %" if percentiles[half] != 50 else "median"]
    )
    add_outer_legend(ax, [*bands, *ax.lines[: len(middle)]], [*names, *middle])


def _check(names: Sequence[str], known: set[str], word: str) -> None:
    for name in names:
        if name not in known:
            raise KeyError(f"no {word} {name!r} in the log; available: {', '.join(sorted(known))}")
