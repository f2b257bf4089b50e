"""Writes a run at a glance."""

import math
from typing import Any

import numpy as np

from ikkuna.cli.terminal import Terminal
from ikkuna.cli.text_heatmap import text_curve, text_heatmap
from ikkuna.reading import StoredRun

__all__ = ["summary_values", "write_summary"]

_FIRST = ("loss", "accuracy", "learning_rate", "norm", "perplexity")


def _network_kinds(run: StoredRun, pass_name: str = "training") -> list[str]:
    hidden = run.internal_kinds()
    kinds = [kind for kind in run.kinds(pass_name) if None in run.names(kind, pass_name) and kind not in hidden]
    return sorted(
        kinds, key=lambda kind: (next((i for i, word in enumerate(_FIRST) if word in kind), len(_FIRST)), kind)
    )


def _module_kinds(run: StoredRun) -> list[str]:
    hidden = run.internal_kinds() | {"findings"}
    found = [kind for kind in run.kinds() if len([name for name in run.names(kind) if name is not None]) > 1]
    return [kind for kind in found if kind not in hidden]


def _write_findings(run: StoredRun, terminal: Terminal) -> None:
    """Write the rules that have found something, with their first steps."""
    if "findings" not in run.kinds():
        return
    found = [(int(run.series("findings", name).steps[0]), name) for name in run.names("findings") if name is not None]
    texts = [f"{name} (step {step})" for step, name in sorted(found)]
    terminal.write(terminal.styled(f"Findings: {', '.join(texts)}", "red"))
    terminal.write(f"`ikkuna check {run.path}` names the modules and the remedies.")


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
    return {**size, "modules": len(run.modules), "last": last}


def write_summary(run: StoredRun, terminal: Terminal, kind: str | None = None, heatmaps: int = 4) -> None:
    """Write the size of a run, a line for each kind of the network, and heat maps.

    Parameters
    ----------
    run : StoredRun
        The run.
    terminal : Terminal
        Where it is written.
    kind : str, optional
        Draw the heat map of this kind only.
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
        + f"  {run.last_step + 1} steps, {run.count} values, {len(run.modules)} modules"
    )
    if run.lost:
        terminal.write(terminal.styled(f"{run.lost} bytes or lines are damaged and were skipped", "red"))
    if run.waiting:
        terminal.write("The last record is incomplete: the run is being written, or it ended without close().")
    _write_findings(run, terminal)
    _write_network(run, terminal)
    chosen = [kind] if kind is not None else _module_kinds(run)[:heatmaps]
    for each in chosen:
        _write_heatmap(run, each, terminal)
    if kind is None and len(_module_kinds(run)) > heatmaps:
        terminal.write(f"Other kinds, for --kind: {', '.join(_module_kinds(run)[heatmaps:])}")


def _write_network(run: StoredRun, terminal: Terminal) -> None:
    for pass_name in run.passes():
        for kind in _network_kinds(run, pass_name):
            values = run.series(kind, None, pass_name).values
            label = kind if pass_name == "training" else f"{kind}.{pass_name}"
            number = f"{values[-1]:.4g}"
            text = f"{label[:34]:<34}  {number:>10}  "
            if not math.isfinite(values[-1]):
                text = terminal.styled(text, "red")
            terminal.write(text + text_curve(values, max(terminal.width - 48, 8), terminal))


def _write_heatmap(run: StoredRun, kind: str, terminal: Terminal) -> None:
    names, steps, values = run.matrix(kind)
    if not names:
        return
    present = np.zeros(values.shape, bool)
    for row, name in zip(present, names, strict=True):
        row[np.searchsorted(steps, run.series(kind, name).steps)] = True
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
    for line in text_heatmap(names, values, present, terminal):
        terminal.write(line)
