"""List the runs of a directory."""

import argparse
from pathlib import Path
from typing import Any

from ikkuna.cli.terminal import Terminal


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
    cells = [
        tuple("-" if each is None else f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values())
        for row in rows
    ]
    header = ("run", "created (UTC)", "steps", "loss", "findings")
    empty = f"'{directory}' contains no run"
    terminal.answer(rows, (lambda: terminal.write_table(header, cells)) if rows else empty)
    return 0


def _facts(path: Path) -> dict[str, Any]:
    """Return what the list shows of a run; None for what it does not have."""
    from ikkuna.cli.run_summary import finding_steps
    from ikkuna.errors import ConfigError
    from ikkuna.store import read_run
    from ikkuna.store.run_directory import read_run_file

    created = getattr(read_run_file(path), "created", "")[:19].replace("T", " ") or None
    facts: dict[str, Any] = {"run": str(path), "created": created, "steps": None, "loss": None, "findings": None}
    try:
        with_values = read_run(path)
    except ConfigError:
        return facts
    loss = with_values.series("loss").values[-1] if None in with_values.names("loss") else None
    found = ", ".join(finding_steps(with_values)) or None
    return facts | {
        "steps": with_values.last_step + 1,
        "loss": None if loss is None else float(loss),
        "findings": found,
    }
