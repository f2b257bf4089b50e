"""Which run an argument of a command means."""

import argparse
from pathlib import Path

from ikkuna.cli.terminal import Terminal

_DEFAULT = "run"


def add_run_argument(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the argument RUN, which may be left out."""
    parser.add_argument(
        "runs" if several else "path",
        metavar="RUN",
        nargs="*" if several else "?",
        default=[_DEFAULT] if several else _DEFAULT,
        help="a run: its directory, an event file, or a file of JSON lines; "
        f"a directory of runs means the newest one (default: {_DEFAULT})",
    )


def add_muted_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows muted findings."""
    parser.add_argument("--muted", action="store_true", help="show muted findings too")


def runs_by_age(directory: Path) -> list[Path]:
    """Return the runs of a directory that have values, the newest last.

    Runs without a date, which other programs have written, come first.
    """
    from ikkuna.errors import ConfigError
    from ikkuna.store import find_runs
    from ikkuna.store.run_contents import find_files
    from ikkuna.store.run_directory import read_run_file

    found = []
    for number, run in enumerate(find_runs(directory) if directory.is_dir() else ()):
        try:
            find_files(run)
        except ConfigError:  # it ended before its first value
            continue
        found.append((getattr(read_run_file(run), "created", ""), number, run))
    return [run for *_, run in sorted(found)]


def chosen_run(path: str, terminal: Terminal) -> str:
    """Return the newest run of a directory of runs, and say so; any other path is returned itself."""
    from ikkuna.errors import ConfigError
    from ikkuna.store.run_contents import find_files

    try:
        find_files(path)
    except ConfigError:
        if not (runs := runs_by_age(Path(path))):
            if path == _DEFAULT and not Path(path).exists():
                raise ConfigError(f"there is no directory '{_DEFAULT}' here; pass the path of a run") from None
            return path  # the reader raises the error
        count = f"{len(runs)} runs, of which the newest is" if len(runs) > 1 else "the run"
        terminal.warn(f"'{path}' contains {count} '{runs[-1]}'")
        return str(runs[-1])
    return path
