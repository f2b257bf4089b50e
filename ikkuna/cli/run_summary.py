"""Writes a run at a glance, with heat maps and curves in characters."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.cli.terminal import Terminal
from ikkuna.diagnosis.check import findings_of
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.numerics.bands import unusual_rows
from ikkuna.store import StoredRun
from ikkuna.store.sparkline import ASCII, LEVELS, reduced_matrix

_ZERO, _BAD = "0", "!"
_MISSING, _MISSING_ASCII = "·", " "
_LABEL = 26
_LEAST_SPAN = 0.1
_ROWS = 16
_WIDE = 72


def _characters(values: NDArray[np.float64], low: float, high: float, terminal: Terminal) -> str:
    """Return a character for each value.

    The scale is logarithmic if the limits are positive and differ by more than a factor of 100.
    """
    levels, missing = (LEVELS, _MISSING) if terminal.can_write(LEVELS + _MISSING) else (ASCII, _MISSING_ASCII)
    with np.errstate(all="ignore"):
        if low > 0 and high > 100 * low:
            share = np.log(values / low) / np.log(high / low)
        else:
            share = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
        places = np.clip(np.nan_to_num(share), 0, 1) * (len(levels) - 1)
    return "".join(
        missing if np.isnan(value) else _BAD if np.isinf(value) else _ZERO if value == 0 else levels[round(place)]
        for value, place in zip(values.tolist(), places.tolist(), strict=True)
    )


def _limits(values: NDArray[np.float64]) -> tuple[float, float]:
    finite = values[np.isfinite(values) & (values != 0)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _binned(values: NDArray[np.float64], present: NDArray[np.bool_], columns: int) -> NDArray[np.float64]:
    """Return means over equal parts of the steps; NaN where there is no value, infinite where a value is not finite."""
    _, means, is_there = reduced_matrix(np.arange(values.shape[1]), values, present, columns)
    return np.where(is_there, np.where(np.isfinite(means), means, np.inf), np.nan)


def _wide_limits(low: float, high: float) -> tuple[float, float]:
    """Return limits that are at least a tenth of the largest magnitude apart, so that noise does not look like a change."""
    lack = _LEAST_SPAN * max(abs(low), abs(high)) - (high - low)
    return (low - lack * 4 / 7, high + lack * 3 / 7) if lack > 0 else (low, high)


def text_curve(values: NDArray[np.float64], width: int, terminal: Terminal) -> str:
    """Return a curve in one line, with ``0`` for zero and ``!`` for values that are not finite.

    Its scale spans at least a tenth of the largest magnitude: a curve that hardly changes is flat.

    Examples
    --------
    >>> import io
    >>> terminal = Terminal(io.TextIOWrapper(io.BytesIO(), "utf-8"))
    >>> text_curve(np.array([1.0, 2.0, 3.0, np.nan]), 10, terminal)
    '▁▅█!'
    >>> text_curve(np.array([2.3, 2.301, 2.299, 2.3]), 10, terminal)
    '▅▅▅▅'
    """
    found = _binned(values[None], np.ones((1, len(values)), bool), width)[0]
    return _characters(found, *_wide_limits(*_limits(found)), terminal)


def text_heatmap(
    names: Sequence[str],
    values: NDArray[np.float64],
    present: NDArray[np.bool_],
    terminal: Terminal,
    classes: Sequence[str] | None = None,
    worse: int = 0,
) -> list[str]:
    """Return the lines of a heat map; of more than 16 modules those that differ most from the others are shown.

    Parameters
    ----------
    names : sequence of str
        The names of the modules.
    values : ndarray (modules, steps)
        The values.
    present : ndarray (modules, steps)
        Which values are there.
    terminal : Terminal
        Decides about the width and the characters.
    classes, worse : sequence of str, int
        See `unusual_rows`.
    """
    cells = _binned(values, present, max(terminal.width - _LABEL - 2, 8))
    if len(names) > _ROWS:
        shown = np.sort(np.argsort(-unusual_rows(cells, classes, worse), kind="stable")[:_ROWS])
        names, cells = [names[i] for i in shown], cells[shown]
    low, high = _limits(cells)
    return [
        f"{_label(name, terminal)}  {_characters(row, low, high, terminal)}"
        for name, row in zip(names, cells, strict=True)
    ]


def _label(name: str, terminal: Terminal, width: int = _LABEL) -> str:
    if not terminal.can_write("…"):
        name = name.replace("…", "~")
    cut = "…" if terminal.can_write("…") else "~"
    return (name if len(name) <= width else f"{name[: width // 2 - 1]}{cut}{name[-width // 2 :]}").ljust(width)


def _module_kinds(run: StoredRun) -> list[str]:
    """Return the kinds of modules, those with a single module last."""
    return sorted(run.module_kinds(), key=lambda kind: len(run.names(kind)) == 1)


def finding_steps(run: StoredRun) -> dict[str, int]:
    """Return the rules that have found something while the model trained, with their first steps, in this order."""
    stored = read_findings(run.path)
    found = [(finding.step or 0, finding.rule) for finding in stored.heard()] if stored else []
    return {name: step for step, name in sorted(found, reverse=True)[::-1]}


def _write_findings(run: StoredRun, terminal: Terminal, muted: bool) -> None:
    """Write the findings, each in a line, with the steps at which they begin."""
    found = findings_of(run, muted)
    for text in (*map(str, found), *([found.note] if found.note else [])):
        for line in textwrap.wrap(text, max(terminal.width, 40), subsequent_indent="  "):
            terminal.write(terminal.styled(line, "red") if text != found.note else line)
    if found:
        terminal.write(f"`ikkuna check {run.path}` names all modules and the remedies.")


def module_count(run: StoredRun) -> int:
    """Return the number of observed modules, or of those with a series if no file has a table of modules."""
    return len(run.modules or run.module_names())


def summary_values(run: StoredRun) -> dict[str, Any]:
    """Return the size of a run and the last value of each series, as plain values."""
    last = {
        pass_name: {
            kind: {
                str(name or ""): float(run.series(kind, name, pass_name).values[-1])
                for name in run.names(kind, pass_name)
            }
            for kind in run.kinds(pass_name)
        }
        for pass_name in run.passes()
    }
    size = {
        "path": str(run.path),
        "last_step": run.last_step,
        "values": run.count,
        "damaged": run.lost,
        "waiting": run.waiting,
    }
    return {**size, "modules": module_count(run), "last": last}


def write_summary(
    run: StoredRun, terminal: Terminal, kind: str | None = None, muted: bool = False, heatmaps: int = 4
) -> None:
    """Write the size of a run, a line for each kind of the network, and heat maps.

    Parameters
    ----------
    run : StoredRun
        The run.
    terminal : Terminal
        Where it is written.
    kind : str, optional
        Draw the heat map of this kind only.
    muted : bool
        Whether to show muted findings too.
    heatmaps : int
        The largest number of heat maps.

    Raises
    ------
    ConfigError
        If the run has no such kind.
    """
    if kind is not None and kind not in run.kinds():
        run.series(kind)  # raises the error that names the kinds
    terminal.write(
        terminal.styled(str(run.path), "bold")
        + f"  {run.count} values to step {run.last_step}, {module_count(run)} modules"
    )
    if run.lost:
        terminal.write(terminal.styled(f"{run.lost} bytes or lines are damaged and were skipped", "red"))
    if run.waiting:
        terminal.write("The last record is incomplete: the run is being written, or it ended without close().")
    _write_findings(run, terminal, muted)
    _write_network(run, terminal)
    chosen = [kind] if kind is not None else _module_kinds(run)[:heatmaps]
    for each in chosen:
        _write_heatmap(run, each, terminal)
    if kind is None and len(_module_kinds(run)) > heatmaps:
        terminal.write(f"Other kinds, for --kind: {', '.join(_module_kinds(run)[heatmaps:])}")


def _write_network(run: StoredRun, terminal: Terminal) -> None:
    is_wide = terminal.width >= _WIDE
    limits = f"{'min':>11}{'max':>11}" if is_wide else ""
    terminal.write(terminal.styled(f"{'network':<28}{'last':>11}{limits}", "bold"))
    for pass_name in run.passes():
        for series in run.network_series(pass_name):
            values = run.series(series.kind, series.name, pass_name).values
            label = series.label if pass_name == "training" else f"{series.label}.{pass_name}"
            finite = values[np.isfinite(values)]
            ends = (f"{finite.min():.3g}", f"{finite.max():.3g}") if len(finite) else ("-", "-")
            limits = f"{ends[0]:>11}{ends[1]:>11}" if is_wide else ""
            text = f"{_label(label, terminal, 28)}{values[-1]:>11.4g}{limits}  "
            if not math.isfinite(values[-1]):
                text = terminal.styled(text, "red")
            terminal.write(text + text_curve(values, max(terminal.width - (63 if is_wide else 41), 8), terminal))


def _write_heatmap(run: StoredRun, kind: str, terminal: Terminal) -> None:
    names, steps, values = run.matrix(kind)
    if not names:
        return
    present = run.presence(kind, names, steps)
    finite = values[np.isfinite(values)]
    limits = f"{finite.min():.3g} to {finite.max():.3g}" if len(finite) else "no finite value"
    bad = int((present & ~np.isfinite(values)).sum())
    notes = [
        limits,
        *([f"{bad} values are not finite (!)"] if bad else []),
        *(["0: zero"] if (values == 0).any() else []),
    ]
    terminal.write()
    terminal.write(f"{terminal.styled(kind, 'bold')}  {', '.join(notes)}  (steps {steps[0]} to {steps[-1]})")
    if len(names) > _ROWS:
        terminal.write(f"The {_ROWS} of {len(names)} modules that differ most from the others:")
    classes, worse = run.order.classes(names), run.quantity(kind).worse
    for line in text_heatmap(names, values, present, terminal, classes=classes, worse=worse):
        terminal.write(line)
