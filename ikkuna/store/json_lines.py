"""The format of files of JSON lines, and how they are read."""

import json
import math
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.values import LISTS, NUMBERS
from ikkuna.support.failures import log


class LinesFormat:
    """The format of a file of JSON lines.

    Parameters
    ----------
    content : str
        The first word of its name.
    """

    replaces_bytes = True

    def __init__(self, content: str) -> None:
        self._content = content

    def name(self, stem: str) -> str:
        """Return the name of the file."""
        return f"{self._content}.{stem}.jsonl"

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        """Return the first line of a file that replaces the end of another one."""
        return b"" if replaced is None else _line({"replaces": replaced.name, "size": replaced.size})

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return a line that reports lost values."""
        return _line({"lost": values, "first_step": first, "step": last})


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
    >>> from ikkuna.backends.jsonl import JSONLinesBackend
    >>> from ikkuna.store.names import Series
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
    contents = {file.name: file.read_bytes() for file in files}
    for name, size in replaced_ends(contents):
        contents[name] = contents[name][:size]
    entries: list[dict[str, Any]] = []
    for file in files:
        damaged = 0
        for line in contents[file.name].splitlines():
            entry = parse_line(line)
            if entry is None:
                damaged += 1
            elif isinstance(step := entry.get("resumed"), int):
                entries = [each for each in entries if not isinstance(at := each.get("step"), int) or at < step]
            elif "replaces" not in entry:
                entries.append(entry)
        if damaged:
            log.warning("'%s': %d incomplete lines were skipped", file, damaged)
    return entries


def replaced_ends(contents: dict[str, bytes]) -> list[tuple[str, int]]:
    """Return the names of the files whose end another file replaces, and the sizes of their beginnings."""
    found = []
    for own, content in contents.items():
        entry = parse_line(content.partition(b"\n")[0]) or {}
        name, size = entry.get("replaces"), entry.get("size")
        if isinstance(name, str) and name in contents and name != own and isinstance(size, int) and size >= 0:
            found.append((name, size))
    return found


_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_STEP, _TIME, _VALUE = b', "step": ', b', "time": ', b', "value": '


@dataclass(slots=True)
class LineFile:
    """The content of a file of JSON lines.

    Parameters
    ----------
    heads : dict of tuple to int
        Kind, name and pass of each series, and its number, in this order.
    series, steps, values, times : list of int or float
        For each number that of its series, its step, value and time.
    restarts : list of (int, int)
        For each resumed training how many numbers are before it, and the step from which on it replaces them.
    others : list of dict
        The lines with something else than a number: histograms, matrices, texts, and the beginnings of resumed trainings.
    lost : int
        Number of damaged lines.
    waiting : int
        Size of the incomplete line at the end.
    """

    heads: dict[tuple[str, str | None, str], int] = field(default_factory=dict)
    series: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0
    waiting: int = 0
    _known: dict[bytes, int] = field(default_factory=dict)

    def add(self, line: bytes) -> None:
        """Add a line; one that the writer of ikkuna has written is split at its commas."""
        head, step, rest = line.partition(_STEP)
        series = self._known.get(head)
        if series is not None and rest.endswith(b"}"):
            step, _, rest = rest.partition(_TIME)
            time, _, value = rest.partition(_VALUE)
            try:
                self._append(series, step, time, value[:-1])
            except ValueError:  # another kind of line, a number in quotes, or a damaged line
                self._parse(line, head)
        else:
            self._parse(line, head)

    def _append(self, series: int, step: Any, time: Any, value: Any) -> None:
        numbers = int(step), float(time), float(value)
        if not _FIRST <= numbers[0] <= _LAST:
            raise ValueError
        self.series.append(series)
        self.steps.append(numbers[0])
        self.times.append(numbers[1])
        self.values.append(numbers[2])

    def _parse(self, line: bytes, head: bytes) -> None:
        entry = parse_line(line)
        if entry is None:
            self.lost += 1
            return
        if "value" not in entry:
            if isinstance(step := entry.get("resumed"), int) and _FIRST <= step <= _LAST:
                self.restarts.append((len(self.series), step))
            if "replaces" not in entry:
                self.others.append(entry)
            return
        try:
            name = entry.get("module")
            key = str(entry["kind"]), None if name is None else str(name), str(entry.get("pass", "training"))
            series = self.heads.get(key, len(self.heads))
            self._append(series, entry["step"], entry.get("time", 0.0), entry["value"])
        except (KeyError, TypeError, ValueError, OverflowError):
            self.lost += 1
            return
        self.heads[key] = series
        if head.startswith(b'{"kind": ') and parse_line(head + b"}") is not None:
            self._known[head] = series


def read_lines(path: Path, size: int | None = None) -> LineFile:
    """Return the content of a file of JSON lines.

    Lines that are no JSON are counted; an incomplete last line is not lost, because it may be being written.

    Parameters
    ----------
    path : Path
        The file.
    size : int, optional
        How many of its bytes are valid; a later file repeats the others.

    Raises
    ------
    OSError
        If the file cannot be read.
    """
    data = path.read_bytes()[:size]
    end = data.rfind(b"\n") + 1
    found = LineFile()
    rest = data[end:]
    for line in data[:end].split(b"\n"):
        if line.strip():
            found.add(line.strip())
    if rest and parse_line(rest) is not None:  # other programs may write no end of the last line
        found.add(rest.strip())
        rest = b""
    found.waiting = len(rest)
    return found
