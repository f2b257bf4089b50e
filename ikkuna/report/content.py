"""Collects what a report shows of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.pictures.heatmap import with_missing_rows
from ikkuna.report.curves import ReportChart, ReportCurve, draw_chart, sparkline
from ikkuna.report.heatmaps import ReportHeatmap, draw_heatmap
from ikkuna.store import StoredRun
from ikkuna.store.quantity import NEUTRAL, Quantity, network_order
from ikkuna.store.run_directory import stored_facts

__all__ = [
    "ModuleRow",
    "RunContent",
    "fan_charts",
    "heatmaps_of",
    "module_kinds",
    "module_rows",
    "network_charts",
    "presence",
    "run_name",
    "spread_charts",
]

_FANS = 12
_SPREAD_STEPS = 400
_COLUMNS = 6


@dataclass
class RunContent:
    """Contents of a report about one run.

    Parameters
    ----------
    name : str
        The name of the run.
    run : StoredRun
        The run.
    colour : int
        The number of its colour.
    findings : Findings or None
        What the rules have found; ``None`` if they were not applied.
    config, environment : dict of str to str
        The configuration and the environment that the run has stored.
    """

    name: str
    run: StoredRun
    colour: int = 0
    findings: Any = None
    config: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def read_settings(self) -> None:
        """Read ``run.json`` in the directory of the run, if there is one."""
        try:
            stored = stored_facts(self.run.path)
        except (OSError, ValueError):
            return
        if isinstance(stored, dict):
            self.config = _texts(stored.get("config"))
            self.environment = _texts(stored.get("environment"))
            if created := stored.get("created"):
                self.environment.setdefault("created", str(created))


def _texts(value: object) -> dict[str, str]:
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}


def network_charts(contents: list[RunContent]) -> list[ReportChart]:
    """Return a chart for each kind of the whole network, with a curve for each run and pass; the loss is first."""
    kinds: dict[str, list[ReportCurve]] = {}
    for content in contents:
        for pass_name in content.run.passes():
            for kind in content.run.network_kinds(pass_name):
                found = content.run.series(kind, None, pass_name)
                parts = [content.name] if len(contents) > 1 else []
                parts += [pass_name] if pass_name != "training" or not parts else []
                colour = content.colour if len(contents) > 1 else len(kinds.get(kind, ()))
                kinds.setdefault(kind, []).append(ReportCurve(" · ".join(parts), found.steps, found.values, colour))
    quantities = {kind: _quantity(contents, kind) for kind in kinds}
    order = sorted(kinds, key=lambda kind: network_order(kind, quantities[kind]))
    return [draw_chart(kind, kinds[kind], quantity=quantities[kind]) for kind in order]


def _quantity(contents: list[RunContent], kind: str) -> Quantity:
    """Return what a kind is, as the first run says that declares it."""
    return next((each.run.quantities[kind] for each in contents if kind in each.run.quantities), NEUTRAL)


def module_kinds(run: StoredRun) -> list[str]:
    """Return the kinds with values of modules, without those that are drawn together as levels of a family."""
    return [kind for kind in run.module_kinds() if run.quantity(kind).level is None]


def heatmaps_of(run: StoredRun) -> list[ReportHeatmap]:
    """Return a heat map for each kind with values of several modules."""
    found = []
    for kind in module_kinds(run):
        names, steps, values = run.matrix(kind)
        if not len(steps):
            continue
        present = presence(run, kind, names, steps)
        quantity = run.quantity(kind)
        names, values, present = with_missing_rows(run.modules, quantity, names, values, present)
        found.append(draw_heatmap(quantity.label(kind), quantity, names, steps, values, present))
    return found


def presence(run: StoredRun, kind: str, names: Sequence[str], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which values of a matrix are there: (names, steps)."""
    present = np.zeros((len(names), len(steps)), bool)
    for row, name in zip(present, names, strict=True):
        row[np.searchsorted(steps, run.series(kind, name).steps)] = True
    return present


def spread_charts(run: StoredRun) -> list[ReportChart]:
    """Return a chart for each kind with the spread over modules: minimum, quartiles, median and maximum."""
    found = []
    for kind in module_kinds(run):
        names, steps, values = run.matrix(kind)
        if len(names) < 3 or not len(steps):
            continue
        shown = np.unique(np.linspace(0, len(steps) - 1, _SPREAD_STEPS).astype(int))
        steps, values = steps[shown], values[:, shown]
        with np.errstate(all="ignore"):
            usable = np.isfinite(values).any(axis=0)
            finite = np.where(np.isfinite(values), values, np.nan)[:, usable]
            levels = _quartiles(finite)
        labels = ("minimum", "25 %", "median", "75 %", "maximum")
        curves = [ReportCurve(label, steps[usable], level) for label, level in zip(labels, levels, strict=True)]
        found.append(draw_chart(kind, curves, quantity=run.quantity(kind), band=True))
    return found


def _quartiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return minimum, quartiles and maximum of each column without NaN; ``numpy.nanpercentile`` takes far longer."""
    if not values.size:
        return np.empty((5, values.shape[1]))
    ordered = np.sort(values, axis=0)  # NaN at the end
    places = np.array([0, 0.25, 0.5, 0.75, 1])[:, None] * ((~np.isnan(values)).sum(axis=0) - 1)
    low = np.take_along_axis(ordered, np.floor(places).astype(int), axis=0)
    high = np.take_along_axis(ordered, np.ceil(places).astype(int), axis=0)
    found: NDArray[np.float64] = low + (places % 1) * (high - low)
    return found


def fan_charts(run: StoredRun) -> list[ReportChart]:
    """Return percentile fans of each kind with percentiles, for at most 12 modules; each curve has the name of its percentile."""
    levels: dict[str, list[tuple[float, str]]] = {}
    for kind in run.kinds():
        quantity = run.quantity(kind)
        if quantity.level is not None:
            levels.setdefault(quantity.family, []).append((quantity.level, kind))
    charts = []
    for base, kinds in sorted(levels.items()):
        kinds.sort()
        names = run.names(kinds[0][1])
        for name in [names[round(i)] for i in np.linspace(0, len(names) - 1, min(len(names), _FANS))]:
            found = [(level, run.series(kind, name)) for level, kind in kinds if name in run.names(kind)]
            curves = [ReportCurve(f"{level:g} %", values.steps, values.values) for level, values in found]
            quantity = run.quantity(kinds[0][1])
            charts.append(draw_chart(f"{base} · {name or 'network'}", curves, quantity=quantity, band=True))
    return charts


@dataclass
class ModuleRow:
    """A row of the table of modules: name, class, number of parameters, and last value and small curve of each kind."""

    name: str
    class_name: str
    parameters: int | None
    cells: list[tuple[str, str]]


def module_rows(run: StoredRun) -> tuple[list[str], list[ModuleRow]]:
    """Return the kinds of the columns, and a row for each module or series of a module."""
    kinds = module_kinds(run)[:_COLUMNS]
    entries = {entry.name: entry for entry in run.modules}
    columns = [
        {name: _cell(run.series(kind, name).values, run.quantity(kind).scale == "log") for name in run.names(kind)}
        for kind in kinds
    ]
    rows = []
    for name in run.module_names():
        entry = entries.get(name)
        cells = [column.get(name, ("", "")) for column in columns]
        rows.append(ModuleRow(name, entry.class_name if entry else "", entry.count if entry else None, cells))
    return kinds, rows


def _cell(values: NDArray[np.float64], is_log: bool) -> tuple[str, str]:
    last = float(values[-1])
    return (f"{last:.3g}" if math.isfinite(last) else str(last)), sparkline(values, is_log)


def run_name(path: Path) -> str:
    """Return the name of a run: that of its directory."""
    resolved = path.resolve()
    return resolved.name or str(resolved)
