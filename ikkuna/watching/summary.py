"""A table of the last values of a run."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.reading import StoredRun

__all__ = ["Summary", "SummaryTable", "network_table", "series_table", "spread_table"]

_ROWS = 40


class SummaryTable(NamedTuple):
    """A table with a title."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Summary:
    """Some lines and tables, which show themselves at the prompt and in a notebook.

    Parameters
    ----------
    lines : sequence of str
        The lines before the tables.
    tables : sequence of SummaryTable
        The tables.

    Examples
    --------
    >>> print(Summary(["net: 2 modules"], [SummaryTable("", ("network", "last"), [("loss", "0.5")])]))
    net: 2 modules
    <BLANKLINE>
    network  last
    -------  ----
    loss     0.5
    """

    def __init__(self, lines: Sequence[str], tables: Sequence[SummaryTable]) -> None:
        self.lines = tuple(lines)
        self.tables = tuple(table for table in tables if table.rows)

    def __str__(self) -> str:
        parts = ["\n".join(self.lines), *map(_text, self.tables)]
        return "\n\n".join(part for part in parts if part)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "<br>".join(html.escape(line) for line in self.lines)
        return f"<div>{lines}</div>" + "".join(map(_html, self.tables))


def _text(table: SummaryTable) -> str:
    lines = (table.header, *table.rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.header))]
    ruled = (table.header, tuple("-" * width for width in widths), *table.rows)
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in ruled)
    return f"{table.title}\n{text}" if table.title else text


def _html(table: SummaryTable) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<p>{html.escape(table.title)}</p><table><tr>{head}</tr>{body}</table>"


def network_table(run: StoredRun) -> SummaryTable:
    """Return a row for each series that belongs to no module: first and last value, minimum and maximum."""
    hidden = run.internal_kinds()
    pairs = [
        (kind, pass_name)
        for pass_name in run.passes()
        for kind in run.kinds(pass_name)
        if None in run.names(kind, pass_name) and kind not in hidden
    ]
    pairs.sort(key=lambda pair: (pair[0] != "loss", "accuracy" not in pair[0], pair))
    rows = []
    for kind, pass_name in pairs:
        title = kind if pass_name == "training" else f"{kind} ({pass_name})"
        rows.append((title, *_cells(run.series(kind, None, pass_name).values)))
    return SummaryTable("", ("network", "first", "last", "least", "greatest"), rows)


def spread_table(run: StoredRun) -> SummaryTable:
    """Return a row for each kind of modules: the least, median and greatest last value, and the modules that have them."""
    rows: list[tuple[str, ...]] = []
    for kind in sorted(set(run.kinds()) - run.internal_kinds()):
        names = [name for name in run.names(kind) if name is not None]
        if not names:
            continue
        last = np.array([run.series(kind, name).values[-1] for name in names])
        finite = np.flatnonzero(np.isfinite(last))
        bad = str(len(last) - len(finite) or "")
        if not len(finite):
            rows.append((kind, str(len(names)), *[""] * 5, bad))
            continue
        low, high = finite[last[finite].argmin()], finite[last[finite].argmax()]
        middle = _number(float(np.median(last[finite])))
        least, most = ((_number(float(last[i])), names[i]) for i in (low, high))
        rows.append((kind, str(len(names)), *least, middle, *most, bad))
    header = ("last values of modules", "modules", "least", "is in", "median", "greatest", "is in", "not finite")
    return SummaryTable("", header, rows)


def series_table(run: StoredRun, kind: str) -> SummaryTable:
    """Return a row for each module of a kind, at most 40.

    Raises
    ------
    ConfigError
        If the run has no such kind.
    """
    names = run.names(kind) or (None,)
    rows = [(str(name or "network"), *_cells(run.series(kind, name).values)) for name in names[:_ROWS]]
    more = f" (the first {_ROWS} of {len(names):,})" if len(names) > _ROWS else ""
    return SummaryTable(f"{kind}{more}", ("module", "first", "last", "least", "greatest"), rows)


def _cells(values: NDArray[np.float64]) -> tuple[str, ...]:
    finite = values[np.isfinite(values)]
    ends = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    return tuple(map(_number, (float(values[0]), float(values[-1]), *ends)))


def _number(value: float) -> str:
    return f"{value:.4g}"
