"""Creates the directory of a run: the next number below the log directory."""

import contextlib
import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from ikkuna.errors import ConfigError, ConfigTypeError, LogDirError
from ikkuna.visualization.files.append_file import make_directories, reason
from ikkuna.visualization.files.run_file import read_run_file

__all__ = ["check_log_dir", "check_run_name", "latest_run", "log_path", "make_run_directory"]

_NAME = re.compile(r"run([0-9]{4,18})")


def make_run_directory(log_dir: Path, name: str | None = None) -> Path:
    """Create and return the next of ``run0001``, ``run0002``, … below `log_dir`, which is created if it is missing.

    With a `name` it is ``name``, or, if that is taken, the next of ``name_2``, ``name_3``, ….
    Two processes never get the same directory, because only one of them can create it.

    Raises
    ------
    LogDirError
        If it cannot be created.
    """
    try:
        make_directories(log_dir)
        number = max(_taken(log_dir, name), default=0)
        while True:
            number += 1
            directory = log_dir / _directory_name(name, number)
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            return directory
    except OSError as error:
        raise LogDirError(f"cannot create a run directory in '{log_dir}': {reason(error)}") from error


def _directory_name(name: str | None, number: int) -> str:
    if name is None:
        return f"run{number:04d}"
    return name if number == 1 else f"{name}_{number}"


def _taken(log_dir: Path, name: str | None) -> dict[int, str]:
    """Return the numbers of the runs with this name, and the names of their directories."""
    pattern = _NAME if name is None else re.compile(re.escape(name) + "(?:_([0-9]{1,18}))?")
    names = (found for entry in os.listdir(log_dir) if (found := pattern.fullmatch(entry)))
    return {int(found[1] or 1): found[0] for found in names}


def latest_run(log_dir: Path, name: str | None = None) -> Path | None:
    """Return the directory of the latest run, or of the latest with this name; ``None`` if there is none."""
    try:
        numbers = {found: number for number, found in _taken(log_dir, name).items()}
        named = [] if name is not None else [entry for entry in os.listdir(log_dir) if entry not in numbers]
    except FileNotFoundError:
        return None
    found = [log_dir / entry for entry in (*named, *numbers)]
    files = {directory: read_run_file(directory) for directory in found if directory.is_dir()}
    runs = [directory for directory, file in files.items() if file is not None or directory.name in numbers]
    return max(runs, key=lambda each: (getattr(files[each], "created", ""), numbers.get(each.name, 0)), default=None)


def check_run_name(name: Any) -> str | None:
    """Return the name of a run if it can be that of a directory.

    Raises
    ------
    ConfigTypeError, ConfigError
        If it is not a string, or not one part of a path.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ConfigTypeError(f"run_name needs a string, got {type(name).__name__}")
    if not name.strip() or name in (".", "..") or len(name.encode()) > 200 or re.search(r"[/\\\0]", name):
        raise ConfigError(
            f"run_name needs a name for a directory, without '/' and at most 200 bytes long, got {name!r}"
        )
    return name


def log_path(log_dir: Any) -> Path:
    """Return `log_dir` as an absolute path, so that it stays the same when the process changes its directory.

    Raises
    ------
    ConfigError
        If it is not a path.
    LogDirError
        If it is relative and the current directory does not exist.
    """
    if not isinstance(log_dir, str | os.PathLike):
        raise ConfigTypeError(f"log_dir is a path, got {type(log_dir).__name__}")
    text = os.fspath(log_dir)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"log_dir is a path, got {text!r}")
    try:
        return Path(text).absolute()
    except OSError as error:
        raise LogDirError(f"cannot write to log directory '{text}': {reason(error)}") from error


def check_log_dir(log_dir: Any) -> Path:
    """Return `log_dir` as a path if a run can be written there; this creates nothing.

    Raises
    ------
    ConfigError
        If it is not a path.
    LogDirError
        If a temporary file cannot be created in it or, while it does not exist, in the nearest existing parent.
    """
    path = log_path(log_dir)
    try:
        with tempfile.TemporaryFile(dir=_nearest(path)):
            pass
    except OSError as error:
        raise LogDirError(f"cannot write to log directory '{path}': {reason(error)}") from error
    return path


def _nearest(path: Path) -> Path:
    """Return `path` or its nearest existing parent."""
    for nearest in (path, *path.parents):
        if nearest.is_symlink() and not nearest.exists():
            raise OSError(errno.ENOENT, f"'{nearest}' is a symbolic link to something that does not exist")
        with contextlib.suppress(FileNotFoundError):
            nearest.stat()
            return nearest
    return path
