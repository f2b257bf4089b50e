"""The backend that writes one JSON object for each value, in double precision, and a function that reads the files.

JSON cannot represent NaN and infinities.
They are written as the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as by Protocol Buffers,
so that every line is valid JSON; ``float()`` of the string returns the value.
"""

import json
import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ikkuna.logger import log
from ikkuna.visualization.backend import Series
from ikkuna.visualization.files.append_file import ReplacedEnd
from ikkuna.visualization.files.file_backend import FileBackend
from ikkuna.visualization.matrix import Matrix

__all__ = ["JSONLinesBackend", "parse_line", "read", "replaced_ends"]

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBERS = ("min", "max", "num", "sum", "sum_squares")
_LISTS = ("bucket_limits", "bucket_counts")


def _number(value: float) -> str:
    """Return the shortest JSON that is parsed to exactly `value`."""
    value = float(value)
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _numbers(values: Any) -> str:
    return f"[{', '.join(map(_number, values))}]"


class _LinesFormat:
    """The format of a file of JSON lines."""

    def name(self, stem: str) -> str:
        return f"values.{stem}.jsonl"

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        if replaced is None:
            return b""
        return json.dumps({"replaces": replaced.name, "size": replaced.size}).encode() + b"\n"

    def loss(self, values: int, first: int, last: int) -> bytes:
        return json.dumps({"lost": values, "first_step": first, "step": last}).encode() + b"\n"


class JSONLinesBackend(FileBackend):
    """Write ``values.*.jsonl``: a line for each value, with ``kind``, ``module``, ``pass``, ``step``, ``time``, ``value``.

    ``module`` is ``null`` for the whole network.
    A histogram has ``histogram`` instead of ``value``.
    A matrix has ``matrix`` instead, with ``rows``, ``columns`` and ``values``.
    A page of text has ``title``, ``text``, ``step`` and ``time``.
    A line with ``lost`` has the number of values that could not be written.
    A line with ``resumed`` begins a resumed run: values of this step and later ones in the lines before are replaced.
    After an error of the disk, the first line of a new file has ``replaces``, the name of an earlier file, and ``size``, the
    number of its bytes that remain valid; the lines after these are repeated in the new file.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._lines: list[str] = []
        self._heads: dict[Series, str] = {}

    def _format(self) -> _LinesFormat:
        return _LinesFormat()

    def _head(self, series: Series) -> str:
        head = self._heads.get(series)
        if head is None:
            names = {"kind": series.kind, "module": series.name, "pass": series.pass_name}
            head = self._heads[series] = json.dumps(names)[:-1]
        return head

    def _add(self, head: str, step: int, rest: str) -> None:
        self._lines.append(f'{head}, "step": {step}, "time": {self._clock.now():.3f}, {rest}}}\n')
        self._values += 1

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Add a line with the value."""
        self._add(self._head(series), step, f'"value": {_number(value)}')

    def add_histogram(self, series: Series, histogram: Any, step: int) -> None:
        """Add a line with the histogram's fields."""
        fields = [f'"{name}": {_number(getattr(histogram, name))}' for name in _NUMBERS]
        fields += [f'"{name}": {_numbers(getattr(histogram, name))}' for name in _LISTS]
        self._add(self._head(series), step, f'"histogram": {{{", ".join(fields)}}}')

    def add_matrix(self, series: Series, matrix: Matrix, step: int) -> None:
        """Add a line with the names and values of a matrix."""
        names = f'"rows": {json.dumps(matrix.rows)}, "columns": {json.dumps(matrix.columns)}'
        values = ", ".join(map(_numbers, matrix.values))
        self._add(self._head(series), step, f'"matrix": {{{names}, "values": [{values}]}}')

    def add_text(self, title: str, text: str, step: int) -> None:
        """Add a line with the page."""
        self._add(json.dumps({"title": title})[:-1], step, f'"text": {json.dumps(text)}')

    def resume(self, step: int) -> None:
        """Add a line by which readers drop `step` and later ones of what was written before."""
        self._lines.append(json.dumps({"resumed": step}) + "\n")

    def _take_block(self, step: int) -> bytes:
        lines, self._lines = self._lines, []
        return "".join(lines).encode()


def _with_numbers(entry: dict[str, Any]) -> dict[str, Any]:
    for key, value in entry.items():
        if key in ("value", *_NUMBERS) and isinstance(value, str):
            entry[key] = _SPECIAL.get(value, value)
        elif key in _LISTS:
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
