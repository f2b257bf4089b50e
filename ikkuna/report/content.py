"""Collects what a report shows of a run as a whole: its settings, its findings, and a chart for each kind of the network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.stored_values import first_values
from ikkuna.report.charts import ReportChart, ReportCurve, chart_of
from ikkuna.store import StoredRun
from ikkuna.store.quantity import LOGGED, NEUTRAL, Quantity, network_order
from ikkuna.store.run_directory import stored_facts

_TIMES = 100


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
    findings : Findings
        What the rules have found.
    config, environment : dict of str to str
        The configuration and the environment that the run has stored.
    """

    name: str
    run: StoredRun
    colour: int = 0
    findings: Findings = field(default_factory=Findings)
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


def network_charts(
    contents: Sequence[RunContent], only: str | None = None, within: tuple[float, float] = (-math.inf, math.inf)
) -> list[ReportChart]:
    """Return a chart for each kind that belongs to no module, with a curve for each run, pass and name; the loss is first.

    Each value that the user logs has a chart of its own.

    Parameters
    ----------
    contents : sequence of RunContent
        The runs.
    only : str, optional
        Return the chart of this kind alone; that of a logged value is ``logged/name``.
    within : (float, float)
        The steps to show.
    """
    charts: dict[str, list[ReportCurve]] = {}
    for content in contents:
        for pass_name in content.run.passes():
            for series in content.run.network_series(pass_name):
                chart = series.label if series.kind == LOGGED else series.kind
                if only not in (None, chart):
                    continue
                found = content.run.series(series.kind, series.name, pass_name)
                parts = [content.name] if len(contents) > 1 else []
                parts += [pass_name] if pass_name != "training" or not parts else []
                parts += [series.name] if series.name and chart == series.kind else []
                colour = content.colour if len(contents) > 1 else len(charts.get(chart, ()))
                charts.setdefault(chart, []).append(ReportCurve(" · ".join(parts), found.steps, found.values, colour))
    quantities = {chart: _quantity(contents, chart) for chart in charts}
    order = sorted(charts, key=lambda chart: network_order(chart, quantities[chart]))
    findings = [
        replace(found, rule=f"{content.name} {found.rule}") if len(contents) > 1 else found
        for content in contents
        for found in content.findings
    ]
    return [
        chart_of(
            chart,
            charts[chart],
            kind=chart,
            quantity=quantities[chart],
            findings=findings,
            lines=_guesses(contents, chart),
            within=within,
        )
        for chart in order
    ]


def _quantity(contents: Sequence[RunContent], kind: str) -> Quantity:
    """Return what a kind is, as the first run says that declares it."""
    return next((each.run.quantities[kind] for each in contents if kind in each.run.quantities), NEUTRAL)


def _guesses(contents: Sequence[RunContent], kind: str) -> list[tuple[float, str]]:
    """Return the cross-entropy of a guess, if a kind is a cross-entropy and the rules have read the number of classes.

    The declarations say which kinds are numbers of classes and cross-entropies; the loss is one if it has the same value.
    """
    found = set()
    for content in contents:
        declared = content.run.quantities
        if not content.run.quantity(kind).is_headline or content.run.quantity(kind).larger != "bad":
            continue
        for classes in (name for name, quantity in declared.items() if quantity.unit == "classes"):
            first = first_values(content.run.path, (kind, classes))
            entropies = [first[n] for n, q in declared.items() if n in first and (q.unit, q.larger) == ("nats", "bad")]
            if any(math.isclose(first[kind], value, rel_tol=1e-3) for value in entropies) and first[classes] > 1:
                found.add(int(first[classes]))
    return [(math.log(classes), f"a guess: ln {classes} = {math.log(classes):.3g}") for classes in sorted(found)]


def wall_times(run: StoredRun) -> list[tuple[int, float]]:
    """Return steps with the seconds since the first value was written, from the longest series of the training."""
    longest = max((s for s in run.all_series if s.pass_name == "training"), key=run.size, default=None)
    if longest is None or not run.size(longest):
        return []
    steps, _, times = run.series(longest.kind, longest.name)
    chosen = np.unique(np.linspace(0, len(steps) - 1, _TIMES).astype(int))
    return [(int(steps[i]), round(float(times[i] - times[0]), 1)) for i in chosen.tolist()]


def run_name(path: Path) -> str:
    """Return the name of a run: that of its directory."""
    resolved = path.resolve()
    return resolved.name or str(resolved)
