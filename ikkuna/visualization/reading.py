"""Reads the values of a finished run from event files and files of JSON lines."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensorboardX.proto.event_pb2 import Event

from ikkuna.errors import ConfigError
from ikkuna.logger import log
from ikkuna.visualization import jsonl
from ikkuna.visualization.files.recovery import whole_records
from ikkuna.visualization.module_table import ModuleEntry, read_module_table
from ikkuna.visualization.names import series_of_tag

__all__ = ["Point", "StoredRun", "read_run"]

_EVENTS = "events.out.tfevents.*"
_LINES = "values.*.jsonl"
_HEAD, _TAIL = 12, 4  # bytes of a record before and behind its payload


class Point(NamedTuple):
    """One stored value.

    Parameters
    ----------
    kind : str
        The kind, such as ``weights_norm2``.
    name : str or None
        Module and path; ``None`` for the whole network.
    pass_name : str
        ``"training"``, or the name of another pass.
    step : int
        The number of the optimizer step.
    value : float
        The value.
    """

    kind: str
    name: str | None
    pass_name: str
    step: int
    value: float


class StoredRun(NamedTuple):
    """The values of a run.

    Parameters
    ----------
    path : Path
        The directory or file.
    points : list of Point
        The values in the order in which they were written; a step that is not after the one before begins a resumed run.
    modules : tuple of ModuleEntry
        The observed modules, of which event files have a table; empty for files of JSON lines alone.
    lost : int
        Number of damaged bytes and lines.
    """

    path: Path
    points: list[Point]
    modules: tuple[ModuleEntry, ...]
    lost: int


def read_run(path: str | os.PathLike[str]) -> StoredRun:
    """Return the values of a run's directory, or of one event file or file of JSON lines.

    Damaged parts of a file are skipped and counted.
    If the directory has event files and JSON lines, the series that the event files lack are read from the JSON lines.

    Raises
    ------
    ConfigError
        If there is no such path, if it has no file of a run, or if the files hold no value.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.visualization.backend import Series
    >>> from ikkuna.visualization.tensorboard import TensorBoardBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = TensorBoardBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("weights_norm2", "fc"), 0.5, 10)
    ...     backend.commit(10)
    ...     backend.close()
    ...     read_run(directory).points
    True
    [Point(kind='weights_norm2', name='fc', pass_name='training', step=10, value=0.5)]
    """
    root = Path(path)
    if not root.exists():
        raise ConfigError(f"'{root}' does not exist")
    events, lines = _files(root)
    points: list[Point] = []
    modules: tuple[ModuleEntry, ...] = ()
    lost = 0
    for file in events:
        found, described, damaged = _read_events(file)
        points += found
        modules, lost = described or modules, lost + damaged
    seen = {point[:3] for point in points}
    for file in lines:
        found, damaged = _read_lines(file)
        points += [point for point in found if point[:3] not in seen]
        lost += damaged
    if not points:
        raise ConfigError(f"'{root}' holds no value of a run")
    if lost:
        log.warning("'%s' is damaged: %d bytes or lines could not be read", root, lost)
    return StoredRun(root, points, modules, lost)


def _files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the event files and the files of JSON lines, in the order of their creation."""
    if root.is_file():
        return ([], [root]) if root.suffix == ".jsonl" else ([root], [])
    events, lines = sorted(root.glob(_EVENTS)), sorted(root.glob(_LINES))
    if not events and not lines:
        runs = sorted(child.name for child in root.iterdir() if re.fullmatch("run[0-9]{4,}", child.name))
        hint = f"; it contains the runs {', '.join(runs[-3:])}" if runs else ""
        raise ConfigError(f"'{root}' has neither an event file nor a file of JSON lines{hint}")
    whole = [file for file in events if file.name.endswith(".recovered")]
    damaged = {file.name.removesuffix(".recovered") for file in whole}
    return [file for file in events if file.name not in damaged], lines


def _read_events(file: Path) -> tuple[list[Point], tuple[ModuleEntry, ...], int]:
    """Return the values, the modules and the number of damaged bytes of an event file."""
    data, points, read = file.read_bytes(), list[Point](), 0
    modules: tuple[ModuleEntry, ...] = ()
    for record in whole_records(data):
        read += len(record)
        try:
            event = Event.FromString(record[_HEAD:-_TAIL])
        except Exception:
            read -= len(record)
            continue
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            if kind == "simple_value":
                points += _point(value.tag, event.step, value.simple_value)
            elif kind == "tensor" and value.tag == "Text/Modules":
                modules = read_module_table(value.tensor.string_val[0].decode(errors="replace"))
    return points, modules, len(data) - read


def _point(tag: str, step: int, value: float) -> Iterator[Point]:
    """Yield the value of a tag that is a series of ikkuna."""
    if (series := series_of_tag(tag)) is not None:
        yield Point(series.kind, series.name, series.pass_name, step, float(value))


def _read_lines(file: Path) -> tuple[list[Point], int]:
    """Return the values and the number of damaged lines of a file of JSON lines."""
    entries = jsonl.read(file)
    points: list[Point] = []
    for entry in entries:
        try:
            if "value" in entry:
                name = entry["module"]
                point = Point(str(entry["kind"]), name, str(entry["pass"]), int(entry["step"]), float(entry["value"]))
                points.append(point)
        except (KeyError, TypeError, ValueError):
            continue
    written = sum(1 for line in file.read_bytes().splitlines() if line.strip())
    return points, written - len(entries)
