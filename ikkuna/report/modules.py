"""Collects what a report shows of the modules of a run: charts, heat maps, the most unusual ones, and their tree."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.pictures.heatmap import with_missing_rows
from ikkuna.diagnosis.findings import Findings
from ikkuna.numerics.bands import quartiles, unusual_rows
from ikkuna.report.charts import ReportChart, ReportCurve, chart_of
from ikkuna.report.content import RunContent
from ikkuna.report.heatmaps import ReportHeatmap, draw_heatmap
from ikkuna.store import StoredRun
from ikkuna.store.quantity import Quantity
from ikkuna.store.sparkline import reduced_matrix, svg_sparkline

_FANS = 12
_SPREAD_STEPS = 400
_COLUMNS = 6
_MANY = 60  # modules of which a heat map shows the most abnormal ones apart
_ABNORMAL = 10
_UNUSUAL = 5.0  # robust standard deviations


def module_kinds(run: StoredRun) -> list[str]:
    """Return the kinds with values of modules, without those that are drawn together as levels of a family."""
    return [kind for kind in run.module_kinds() if run.quantity(kind).level is None]


class KindTable(NamedTuple):
    """The values of the modules of a kind.

    Parameters
    ----------
    kind : str
        The kind.
    quantity : Quantity
        What it is.
    names : tuple of str
        The series, in the order of the network.
    steps : ndarray (steps,)
        The steps.
    values : ndarray (names, steps)
        The values.
    present : ndarray (names, steps)
        Which values are there.
    """

    kind: str
    quantity: Quantity
    names: tuple[str, ...]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]

    def rows(self, places: Sequence[int]) -> "KindTable":
        """Return some of the rows, in the order of `places`."""
        chosen = list(places)
        names = tuple(self.names[i] for i in chosen)
        return self._replace(names=names, values=self.values[chosen], present=self.present[chosen])


def kind_tables(run: StoredRun) -> Iterator[KindTable]:
    """Yield the values of the modules of each kind; those of series that belong to no module are left out."""
    for kind in module_kinds(run):
        names, steps, values = run.matrix(kind)
        if not len(steps):
            continue
        table = KindTable(kind, run.quantity(kind), names, steps, values, run.presence(kind, names, steps))
        inside = [i for i, name in enumerate(names) if run.order.belongs(name)]
        yield table if len(inside) == len(names) else table.rows(inside)


def heatmaps_of(run: StoredRun) -> list[ReportHeatmap]:
    """Return a heat map for each kind with values of several modules."""
    return [drawn for table in kind_tables(run) for drawn in table_heatmaps(run, table)[:1]]


def table_heatmaps(run: StoredRun, table: KindTable) -> list[ReportHeatmap]:
    """Return the heat maps of a kind: of more than 60 modules first the most abnormal ones, then all, by their classes."""
    if not table.names:
        return []
    title, quantity = table.quantity.label(table.kind), table.quantity
    names, values, present = with_missing_rows(run.modules, quantity, table.names, table.values, table.present)
    if len(names) <= _MANY:
        return [draw_heatmap(title, quantity, names, table.steps, values, present)]
    scores = _scores(run, table)
    worst = sorted(np.argsort(-scores, kind="stable")[:_ABNORMAL].tolist())
    first = table.rows(worst)
    classes = run.order.classes(names)
    groups = {name: number for number, name in enumerate(dict.fromkeys(classes))}
    grouped = sorted(range(len(names)), key=lambda i: groups[classes[i]])
    whole = draw_heatmap(
        f"{title}: all {len(names):,}",
        quantity,
        [names[i] for i in grouped],
        table.steps,
        values[grouped],
        present[grouped],
    )
    part = draw_heatmap(
        f"{title}: the {len(worst)} most unusual of {len(names):,}",
        quantity,
        first.names,
        table.steps,
        first.values,
        first.present,
        whole.scale,
    )
    return [part, whole]


def _scores(run: StoredRun, table: KindTable) -> NDArray[np.float64]:
    """Return how unusual each row is among those of its class."""
    _, values, _ = reduced_matrix(table.steps, table.values, table.present, 100)
    return unusual_rows(values, run.order.classes(table.names), table.quantity.worse)


class Abnormal(NamedTuple):
    """A module that differs from the others of its class, or that a finding names.

    Parameters
    ----------
    name, class_name : str
        The module and its class.
    score : float
        By how many robust standard deviations it differs.
    text : str
        What differs.
    curve : str
        A small curve of it.
    rules : list of str
        The rules whose findings name it.
    """

    name: str
    class_name: str
    score: float
    text: str
    curve: str
    rules: list[str]


def abnormal_modules(content: RunContent, tables: Sequence[KindTable]) -> list[Abnormal]:
    """Return up to ten modules: those of findings first, then those that differ most from the others."""
    rules: dict[str, list[str]] = {}
    for finding in content.findings:
        for name in finding.modules or ((finding.module,) if finding.module else ()):
            rules.setdefault(name, []).append(finding.rule)
    best: dict[str, tuple[float, KindTable, int]] = {}
    for table in tables:
        for i, score in enumerate(_scores(content.run, table).tolist()):
            name = table.names[i]
            if (score >= _UNUSUAL or name in rules) and score > best.get(name, (-1.0,))[0]:
                best[name] = score, table, i
    order = sorted(dict.fromkeys([*rules, *best]), key=lambda name: (name not in rules, -best.get(name, (0.0,))[0]))
    found = []
    for name in order[:_ABNORMAL]:
        score, text, curve = 0.0, "", ""
        if name in best:
            score, table, i = best[name]
            own = table.values[i, table.present[i]]
            text = f"{table.quantity.label(table.kind)}: {own[-1]:.3g}; the median of the others is {_middle(table, i):.3g}"
            curve = svg_sparkline(own, is_log=table.quantity.scale == "log")
        class_name = content.run.order.classes([name])[0]
        found.append(Abnormal(name, class_name, score, text, curve, rules.get(name, [])))
    return found


def _middle(table: KindTable, row: int) -> float:
    """Return the median of the other rows at the last step."""
    others = np.delete(table.values[:, -1], row)
    others = others[np.isfinite(others)]
    return float(np.median(others)) if len(others) else math.nan


def spread_chart(table: KindTable, findings: Findings) -> ReportChart | None:
    """Return a chart with the spread over modules: minimum, quartiles, median and maximum; ``None`` for fewer than three."""
    if len(table.names) < 3 or not len(table.steps):
        return None
    chosen = np.unique(np.linspace(0, len(table.steps) - 1, _SPREAD_STEPS).astype(int))
    steps, values = table.steps[chosen], table.values[:, chosen]
    with np.errstate(all="ignore"):
        usable = np.isfinite(values).any(axis=0)
        levels = quartiles(np.where(np.isfinite(values), values, np.nan)[:, usable])
    labels = ("minimum", "25 %", "median", "75 %", "maximum")
    curves = [ReportCurve(label, steps[usable], level) for label, level in zip(labels, levels, strict=True)]
    return chart_of(table.kind, curves, kind=table.kind, quantity=table.quantity, is_band=True, findings=findings)


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
            charts.append(chart_of(f"{base} · {name or 'network'}", curves, quantity=quantity, is_band=True))
    return charts


@dataclass
class ModuleRow:
    """A row of the table of modules: name, class, number of parameters, and last value and small curve of each kind."""

    name: str
    class_name: str
    parameters: int | None
    cells: list[tuple[str, str]]


def module_rows(run: StoredRun) -> tuple[list[str], list[ModuleRow]]:
    """Return the kinds of the columns, and a row for each module and for each of its parameters and outputs with values.

    Series that belong to no module are left out.
    """
    kinds = module_kinds(run)[:_COLUMNS]
    entries = {entry.name: entry for entry in run.modules}
    columns = [
        {name: _cell(run.series(kind, name).values, run.quantity(kind).scale == "log") for name in run.names(kind)}
        for kind in kinds
    ]
    rows = []
    for name in run.module_names():
        entry, owner = entries.get(name), run.order.entry(name)
        cells = [column.get(name, ("", "")) for column in columns]
        if entry is None and owner is not None and not any(text for text, _ in cells):
            continue
        class_name = entry.class_name if entry else f"of {owner.class_name}" if owner else ""
        rows.append(ModuleRow(name, class_name, entry.count if entry else None, cells))
    return kinds, rows


def _cell(values: NDArray[np.float64], is_log: bool) -> tuple[str, str]:
    last = float(values[-1])
    return (f"{last:.3g}" if math.isfinite(last) else str(last)), svg_sparkline(values, is_log=is_log)


@dataclass
class Block:
    """A block of a network: the rows of its own modules, rows of one class together, and the blocks inside."""

    name: str
    rows: list[ModuleRow] = field(default_factory=list)
    blocks: list["Block"] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of rows, with those of the blocks inside."""
        return len(self.rows) + sum(block.count for block in self.blocks)


def blocks_of(rows: Sequence[ModuleRow]) -> Block:
    """Return the rows as a tree by the parts of their names.

    Examples
    --------
    >>> rows = [ModuleRow(name, "Linear", 0, []) for name in ("stem", "blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2")]
    >>> tree = blocks_of(rows)
    >>> [row.name for row in tree.rows], [(block.name, block.count) for block in tree.blocks[0].blocks]
    (['stem'], [('blocks.0', 2), ('blocks.1', 2)])
    """
    root = Block("")
    found = {"": root}

    def block(name: str) -> Block:
        if name not in found:
            found[name] = Block(name)
            block(name.rpartition(".")[0]).blocks.append(found[name])
        return found[name]

    for row in rows:
        block(row.name.partition(":")[0].rpartition(".")[0]).rows.append(row)
    for each in found.values():
        classes = {name: number for number, name in enumerate(dict.fromkeys(row.class_name for row in each.rows))}
        each.rows.sort(key=lambda row: classes[row.class_name])
    return root
