"""Reads files of JSON lines that the backend ``jsonl`` has written."""

import json
import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ikkuna.logger import log

__all__ = ["LISTS", "NUMBERS", "parse_line", "read", "replaced_ends"]

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
NUMBERS = ("min", "max", "num", "sum", "sum_squares")
LISTS = ("bucket_limits", "bucket_counts")


def _with_numbers(entry: dict[str, Any]) -> dict[str, Any]:
    for key, value in entry.items():
        if key in ("value", *NUMBERS) and isinstance(value, str):
            entry[key] = _SPECIAL.get(value, value)
        elif key in LISTS:
            entry[key] = _list_with_numbers(value)
        elif key == "matrix" and isinstance(value, dict):
            value["values"] = [_list_with_numbers(row) for row in value["values"]]
    return entry


def _list_with_numbers(items: list[Any]) -> list[Any]:
    return [_SPECIAL.get(item, item) if isinstance(item, str) else item for item in items]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a line, with NaN and infinities as numbers; ``None`` if it is no JSON object.

    Examples
    --------
    >>> parse_line(b'{"kind": "loss", "value": "NaN"}')
    {'kind': 'loss', 'value': nan}
    """
    try:
        entry = json.loads(line, object_hook=_with_numbers)
    except (ValueError, KeyError, TypeError, RecursionError):  # RecursionError: nested too deeply
        return None
    return entry if isinstance(entry, dict) else None


def read(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the entries of a file, or of all such files of a run's directory in the order of their creation.

    Incomplete lines, such as the last line after a crash, are skipped, and so are lines that a later file replaces.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.visualization.jsonl import JSONLinesBackend
    >>> from ikkuna.visualization.series import Series
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = JSONLinesBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("loss"), 0.1, 3)
    ...     backend.commit(3)
    ...     backend.close()
    ...     [entry] = read(directory)
    True
    >>> entry["kind"], entry["module"], entry["step"], entry["value"]
    ('loss', None, 3, 0.1)
    """
    path = Path(path)
    files = sorted(path.glob("values.*.jsonl")) if path.is_dir() else [path]
    entries, damaged = _read_files(files)
    for file, count in damaged.items():
        log.warning("'%s': %d incomplete lines were skipped", file, count)
    return entries


def _read_files(files: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[Path, int]]:
    """Return the entries of the files of one run in their order, and the numbers of damaged lines of the files that have some.

    Lines that a later file or a resumed run replaces are left out.
    """
    contents = {file.name: file.read_bytes() for file in files}
    for name, size in replaced_ends(contents):
        contents[name] = contents[name][:size]
    entries: list[dict[str, Any]] = []
    damaged: dict[Path, int] = {}
    for file in files:
        for line in contents[file.name].splitlines():
            entry = parse_line(line)
            if entry is None:
                damaged[file] = damaged.get(file, 0) + 1
            elif isinstance(step := entry.get("resumed"), int):
                entries = [earlier for earlier in entries if not _is_after(earlier, step)]
            elif "replaces" not in entry:
                entries.append(entry)
    return entries, damaged


def _is_after(entry: dict[str, Any], step: int) -> bool:
    found = entry.get("step")
    return isinstance(found, int) and found >= step


def replaced_ends(contents: dict[str, bytes]) -> list[tuple[str, int]]:
    """Return the names of the files whose end another file replaces, and the sizes of their beginnings."""
    found = []
    for own, content in contents.items():
        entry = parse_line(content.partition(b"\n")[0]) or {}
        name, size = entry.get("replaces"), entry.get("size")
        if isinstance(name, str) and name in contents and name != own and isinstance(size, int) and size >= 0:
            found.append((name, size))
    return found
