"""Reads files of JSON lines."""

from pathlib import Path
from typing import Any, NamedTuple

from ikkuna.visualization.files.json_lines import parse_line

__all__ = ["LineFile", "read_lines"]

_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
_STEP, _TIME, _VALUE = b', "step": ', b', "time": ', b', "value": '


class LineFile(NamedTuple):
    """The content of a file of JSON lines.

    Parameters
    ----------
    heads : list of tuple
        Kind, name and pass of each series.
    series, steps, values, times : list of int or float
        For each number the position of its series in `heads`, its step, value and time.
    restarts : list of (int, int)
        For each resumed training how many numbers are before it, and the step from which on it replaces them.
    others : list of dict
        The lines with something else than a number: histograms, matrices and texts.
    lost : int
        Number of damaged lines.
    waiting : int
        Size of the incomplete line at the end.
    """

    heads: list[tuple[str, str | None, str]]
    series: list[int]
    steps: list[int]
    values: list[float]
    times: list[float]
    restarts: list[tuple[int, int]]
    others: list[dict[str, Any]]
    lost: int
    waiting: int


class _Builder:
    """The lists of a file, while they are filled."""

    def __init__(self) -> None:
        self.heads: dict[tuple[str, str | None, str], int] = {}
        self.known: dict[bytes, int] = {}
        self.series: list[int] = []
        self.steps: list[int] = []
        self.values: list[float] = []
        self.times: list[float] = []
        self.restarts: list[tuple[int, int]] = []
        self.others: list[dict[str, Any]] = []
        self.lost = 0

    def add(self, line: bytes) -> None:
        """Add a line; one that the writer of ikkuna has written is split at its commas."""
        head, step, rest = line.partition(_STEP)
        series = self.known.get(head)
        if series is not None and rest.endswith(b"}"):
            step, _, rest = rest.partition(_TIME)
            time, _, value = rest.partition(_VALUE)
            try:
                numbers = int(step), float(time), float(value[:-1])
                if not _FIRST <= numbers[0] <= _LAST:
                    raise ValueError
            except ValueError:  # another kind of line, a number in quotes, or a damaged line
                self._parse(line, head)
                return
            self._append(series, numbers[0], numbers[2], numbers[1])
        else:
            self._parse(line, head)

    def _append(self, series: int, step: int, value: float, time: float) -> None:
        self.series.append(series)
        self.steps.append(step)
        self.values.append(value)
        self.times.append(time)

    def _parse(self, line: bytes, head: bytes) -> None:
        entry = parse_line(line)
        if entry is None:
            self.lost += 1
            return
        if "value" not in entry:
            if isinstance(step := entry.get("resumed"), int) and _FIRST <= step <= _LAST:
                self.restarts.append((len(self.series), step))
            elif "replaces" not in entry:
                self.others.append(entry)
            return
        try:
            name = entry.get("module")
            key = str(entry["kind"]), None if name is None else str(name), str(entry.get("pass", "training"))
            numbers = int(entry["step"]), float(entry["value"]), float(entry.get("time", 0.0))
            if not _FIRST <= numbers[0] <= _LAST:
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            self.lost += 1
            return
        series = self.heads.setdefault(key, len(self.heads))
        if head.startswith(b'{"kind": ') and parse_line(head + b"}") is not None:
            self.known[head] = series
        self._append(series, *numbers)


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
    builder = _Builder()
    rest = data[end:]
    for line in data[:end].split(b"\n"):
        if line.strip():
            builder.add(line.strip())
    if rest and parse_line(rest) is not None:  # other programs may write no end of the last line
        builder.add(rest.strip())
        rest = b""
    lists = builder.series, builder.steps, builder.values, builder.times, builder.restarts, builder.others
    return LineFile(list(builder.heads), *lists, builder.lost, len(rest))
