"""Figures of the stored values of a run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ikkuna.errors import ConfigError
from ikkuna.reading import StoredRun
from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.pictures.chart import ChartView, Line, heading
from ikkuna.visualization.pictures.chart_picture import draw_chart
from ikkuna.visualization.pictures.quantile_bands import QuantileView
from ikkuna.visualization.series import Series

__all__ = ["draw_kind"]

_MOST = 16
_LEVELS = (0, 25, 50, 75, 100)


def draw_kind(run: StoredRun, kind: str, modules: Sequence[str] | None = None, pass_name: str = "training") -> Figure:
    """Return a figure of a kind: a line for each module, or quantiles over the modules if there are more than 16.

    The pictures of the backend ``"mpl"`` are drawn in the same way.

    Raises
    ------
    ConfigError
        If the run has no such kind or module.
    """
    names = run.names(kind, pass_name)
    if not names:
        run.series(kind, None, pass_name)  # raises the error that names the kinds
    for wanted in modules or ():
        run.series(kind, wanted, pass_name)
    chosen = names if modules is None else tuple(name for name in names if name in modules)
    if not chosen:
        raise ConfigError(f"plot({kind!r}) needs at least one module")
    title, count = heading(Series(kind, None, pass_name)), len(chosen)
    order = ModuleOrder(run.modules)
    if modules is None and count > _MOST:
        return draw_chart(ChartView(title, kind, None, count, quantiles=_quantiles(run, kind, pass_name)), order.key)
    lines = []
    for name in chosen:
        found = run.series(kind, name, pass_name)
        lines.append(Line(name, found.steps, found.values))
    return draw_chart(ChartView(title, kind, None, count, tuple(lines)), order.key)


def _quantiles(run: StoredRun, kind: str, pass_name: str) -> QuantileView:
    """Return the quantiles of the modules that have a value at a step; NaN if one of these is not finite."""
    names, steps, values = run.matrix(kind, pass_name)
    broken = np.zeros(values.shape, bool)
    for row, name in zip(broken, names, strict=True):
        found = run.series(kind, name, pass_name)
        row[np.searchsorted(steps, found.steps)] = ~np.isfinite(found.values)
    usable = ~broken.any(axis=0)
    levels = np.full((len(_LEVELS), len(steps)), np.nan)
    if usable.any():
        levels[:, usable] = np.nanpercentile(values[:, usable], _LEVELS, axis=0)
    return QuantileView(steps, levels)
