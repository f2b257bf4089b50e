"""Finds the files of a run."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from ikkuna.errors import ConfigError
from ikkuna.visualization.files.run_file import RUN_FILE

__all__ = ["RunFiles", "find_files", "find_runs"]

_EVENTS = "*tfevents*"
_LINES = "values.*.jsonl"
_NAMED = 5  # runs that an error names
_RUN = re.compile("run[0-9]{4,}")


class RunFiles(NamedTuple):
    """The files of a run, in the order of their creation.

    Parameters
    ----------
    events : list of Path
        The event files.
    lines : list of Path
        The files of JSON lines.
    """

    events: list[Path]
    lines: list[Path]


def find_files(path: str | os.PathLike[str]) -> RunFiles:
    """Return the files of a run's directory, or the one file that `path` is.

    A file that was recovered replaces the damaged one.

    Raises
    ------
    ConfigError
        If there is no such path, or if it has no file of a run; the message names the runs that the directory contains.
    """
    root = Path(path)
    if not root.exists():
        raise ConfigError(f"'{root}' does not exist")
    if not root.is_dir():
        if not root.is_file():
            raise ConfigError(f"'{root}' is neither a directory nor a file")
        return RunFiles([], [root]) if root.suffix == ".jsonl" else RunFiles([root], [])
    events = sorted(file for file in root.glob(_EVENTS) if file.is_file())
    lines = sorted(file for file in root.glob(_LINES) if file.is_file())
    if not events and not lines:
        runs = find_runs(root)
        raise ConfigError(f"'{root}' has neither an event file nor a file of JSON lines{_listed(runs)}")
    damaged = {file.name.removesuffix(".recovered") for file in events if file.name.endswith(".recovered")}
    return RunFiles([file for file in events if file.name not in damaged], lines)


def _listed(runs: list[Path]) -> str:
    """Return what an error says of the runs below a directory; of many, the last ones are named."""
    if not runs:
        return ""
    if len(runs) == 1:
        return f"; it contains the run '{runs[0]}'"
    names = ", ".join(run.name for run in runs[-_NAMED:])
    last = f"{len(runs)} runs, the last of which are" if len(runs) > _NAMED else f"{len(runs)} runs:"
    return f"; it contains {last} {names}; pass one, such as '{runs[-1]}'"


def find_runs(directory: Path) -> list[Path]:
    """Return the directories of runs below a log directory: named ones, then the others in the order of their numbers."""
    children = [child for child in directory.iterdir() if child.is_dir()]
    numbered = [child for child in children if _RUN.fullmatch(child.name)]
    named = [child for child in children if child not in numbered and (child / RUN_FILE).is_file()]
    return sorted(named) + sorted(numbered, key=lambda child: (int(child.name[3:]), child.name))
