"""List the runs of a directory."""

import argparse
from pathlib import Path
from typing import Any

from ikkuna.cli.terminal import Terminal

_COLUMNS = {"run": "run", "created": "created (UTC)", "last_step": "last step", "loss": "loss", "findings": "findings"}
"""By field of the JSON output, the header of its column."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="LOGDIR", nargs="?", default="run", help="a directory of runs (default: run)")


def run(options: argparse.Namespace, terminal: Terminal) -> int:
    from ikkuna.cli.terminal import runs_by_age
    from ikkuna.errors import ConfigError

    directory = Path(options.path)
    if not directory.is_dir():
        raise ConfigError(f"'{directory}' is not a directory")
    rows = []
    for path in runs_by_age(directory):
        terminal.progress(f"reading {path}")
        rows.append(_facts(path))
    terminal.progress("")
    cells = [tuple(_text(row[name]) for name in _COLUMNS) for row in rows]
    empty = f"'{directory}' contains no run"
    terminal.answer(rows, (lambda: terminal.write_table(tuple(_COLUMNS.values()), cells)) if rows else empty)
    return 0


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(path: Path) -> dict[str, Any]:
    """Return what the list shows of a run; None for what it does not have."""
    from ikkuna.cli.run_summary import finding_steps
    from ikkuna.errors import ConfigError
    from ikkuna.store import read_run
    from ikkuna.store.run_directory import read_run_file

    created = getattr(read_run_file(path), "created", "")[:19].replace("T", " ") or None
    facts = dict.fromkeys((*_COLUMNS, "steps")) | {"run": str(path), "created": created}
    try:
        with_values = read_run(path)
    except ConfigError:
        return facts
    loss = with_values.series("loss").values[-1] if None in with_values.names("loss") else None
    found = ", ".join(finding_steps(with_values)) or None
    return facts | {
        "last_step": with_values.last_step,
        "loss": None if loss is None else float(loss),
        "findings": found,
        "steps": with_values.last_step + 1,
    }
