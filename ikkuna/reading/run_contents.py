"""Joins the files of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.reading.event_columns import KIND_HISTOGRAM, KIND_TENSOR, EventColumns
from ikkuna.reading.event_file import EventFile
from ikkuna.reading.line_file import LineFile, read_lines
from ikkuna.reading.run_files import find_files
from ikkuna.reading.stored_value import (
    ReadHistogram,
    StoredHistogram,
    StoredValue,
    decode_tensor_scalar,
    decode_text,
    plugin_name,
)
from ikkuna.reading.value_table import ValuePart, ValueTable, joined
from ikkuna.visualization.files.json_lines import replaced_ends
from ikkuna.visualization.module_table import ModuleEntry, read_module_table
from ikkuna.visualization.names import decode, series_of_tag
from ikkuna.visualization.series import Series

__all__ = ["RunContents", "RunFilesReader"]

_MODULES = "Text/Modules"


@dataclass
class RunContents:
    """Everything that the files of a run contain.

    Parameters
    ----------
    series : dict of Series to int
        The number of each series.
    parts : list of ValuePart
        The numbers: those of the event files, and those of the files of JSON lines.
    stored : dict of Series to list
        Where the histograms of each series are.
    texts : dict of str to str
        The latest page of text of each title.
    modules : tuple of ModuleEntry
        The modules.
    matrices : list of dict
        The matrices in files of JSON lines.
    lost, waiting : int
        Number of damaged bytes and lines, and size of the incomplete records at the ends of files.
    """

    series: dict[Series, int] = field(default_factory=dict)
    parts: list[ValuePart] = field(default_factory=list)
    stored: dict[Series, list[StoredValue | ReadHistogram]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    modules: tuple[ModuleEntry, ...] = ()
    matrices: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0
    waiting: int = 0

    def table(self) -> ValueTable:
        """Return the numbers by series."""
        return ValueTable(self.parts, len(self.series))

    def number_of(self, series: Series) -> int:
        """Return the number of a series, a new one if it is new."""
        return self.series.setdefault(series, len(self.series))


class RunFilesReader:
    """Reads the files of a run; what was read of event files is kept for the next time.

    Parameters
    ----------
    path : Path
        The directory or file.
    is_native : bool
        Whether event files may be read by the native library.
    """

    def __init__(self, path: Path, is_native: bool = True) -> None:
        self._path = path
        self._is_native = is_native
        self._files: dict[Path, EventFile] = {}

    def read(self) -> RunContents:
        """Return the contents.

        Raises
        ------
        ConfigError
            If there is no run.
        OSError
            If a file cannot be read.
        """
        found, contents = find_files(self._path), RunContents()
        columns = []
        for path in found.events:
            file = self._files.setdefault(path, EventFile(path, self._is_native))
            columns.append((path, file.update()))
            contents.waiting += file.waiting
        _add_events(contents, columns)
        _add_lines(contents, found.lines)
        return contents

    def close(self) -> None:
        """Free the memory of the files."""
        for file in self._files.values():
            file.close()


def _series_of(tag: str) -> Series | None:
    """Return the series of a tag; tags of other programs and shortened tags are series too."""
    if (series := series_of_tag(tag)) is not None:
        return series
    head, _, rest = tag.partition("/")
    if head in ("Overview", "Dashboard", "Heatmaps", "Matrices", "Text"):
        return None
    return Series(head, rest or None)


def _add_events(contents: RunContents, files: list[tuple[Path, EventColumns]]) -> None:
    """Add the values of event files, in their order, as one part."""
    parts: list[ValuePart] = []
    before = 0
    for path, columns in files:
        known = [_series_of(tag) for tag in columns.tags]
        used = np.zeros(len(known), bool)
        used[columns.tag] = True
        numbers = np.array(
            [contents.number_of(series) if series and used[i] else -1 for i, series in enumerate(known)], np.int32
        )
        part = _scalars(columns, numbers)
        part.restarts = [(before + place, step) for place, step in part.restarts]
        parts.append(part)
        before += len(part.series)
        contents.lost += columns.lost
        tensors = _add_others(contents, path, columns, known)
        if len(tensors.series):
            parts.append(tensors)
            before += len(tensors.series)
    if parts:
        contents.parts.append(joined(parts))


def _scalars(columns: EventColumns, numbers: NDArray[np.int32]) -> ValuePart:
    series = numbers[columns.tag] if len(numbers) else np.empty(0, np.int32)
    mask = series >= 0
    places = np.concatenate([[0], np.cumsum(mask)])
    restarts = [(int(places[place]), step) for step, place, _ in columns.starts.tolist()]
    event = columns.event if mask.all() else columns.event[mask]
    series = series if mask.all() else series[mask]
    value = columns.value if mask.all() else columns.value[mask]
    return ValuePart(series, columns.steps[event], value.astype(np.float64), columns.times[event], restarts)


def _add_others(contents: RunContents, path: Path, columns: EventColumns, known: list[Series | None]) -> ValuePart:
    """Add histograms, texts and modules; return the scalars that are stored as tensors, as by TensorFlow."""
    plugins: dict[int, str] = {}
    scalars: list[tuple[int, int, float, float]] = []
    for tag, event, kind, place, size in columns.others.tolist():
        series, step = known[tag], int(columns.steps[event])
        stored = StoredValue(path, step, float(columns.times[event]), place, size)
        if kind == KIND_HISTOGRAM and series is not None:
            contents.stored.setdefault(series, []).append(stored)
        elif kind == KIND_TENSOR:
            data = stored.read()
            plugin = plugins.get(tag) or plugins.setdefault(tag, plugin_name(data))
            if plugin == "text" or columns.tags[tag].startswith("Text/"):
                _add_text(contents, columns.tags[tag], decode_text(data))
            elif plugin == "scalars" and series is not None and (value := decode_tensor_scalar(data)) is not None:
                scalars.append((contents.number_of(series), step, value, stored.time))
    _purge_stored(contents.stored, path, columns)
    numbers, steps, values, times = zip(*scalars, strict=True) if scalars else ((), (), (), ())
    return ValuePart(
        np.array(numbers, np.int32), np.array(steps, np.int64), np.array(values, float), np.array(times, float)
    )


def _purge_stored(stored: dict[Series, list[StoredValue | ReadHistogram]], path: Path, columns: EventColumns) -> None:
    """Remove the histograms that the sessions of a file replace."""
    for step, _, count in columns.starts.tolist():
        place = int(columns.others[count][3]) if count < len(columns.others) else None
        for series, found in stored.items():
            stored[series] = [
                each
                for each in found
                if each.step < step
                or (isinstance(each, StoredValue) and each.path == path and (place is not None and each.place >= place))
            ]


def _add_text(contents: RunContents, tag: str, text: str | None) -> None:
    if text is None:
        return
    if tag == _MODULES:
        contents.modules = read_module_table(text) or contents.modules
    contents.texts[decode(tag.removeprefix("Text/"))] = text


def _add_lines(contents: RunContents, paths: list[Path]) -> None:
    """Add the values of files of JSON lines that the event files lack, as one part."""
    heads = {path.name: _first_line(path) for path in paths}
    sizes = dict(replaced_ends(heads))
    known = set(contents.series)
    columns: list[tuple[int, int, float, float]] = []
    restarts: list[tuple[int, int]] = []
    is_restart = _restart_finder()
    for path in paths:
        file = read_lines(path, sizes.get(path.name))
        contents.lost += file.lost
        contents.waiting += file.waiting
        series = [Series(*head) for head in file.heads]
        numbers = [-1 if each in known else contents.number_of(each) for each in series]
        resumed = dict(file.restarts)
        for place, (i, step, value, time) in enumerate(
            zip(file.series, file.steps, file.values, file.times, strict=True)
        ):
            if place in resumed:
                restarts.append((len(columns), resumed[place]))
            if numbers[i] >= 0:
                if is_restart(series[i].pass_name, numbers[i], step):
                    restarts.append((len(columns), step))
                columns.append((numbers[i], step, value, time))
        _add_line_others(contents, file)
    if columns:
        numbers_, steps, values, times = zip(*columns, strict=True)
        arrays = (
            np.array(numbers_, np.int32),
            np.array(steps, np.int64),
            np.array(values, float),
            np.array(times, float),
        )
        contents.parts.append(ValuePart(*arrays, restarts))


def _first_line(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.readline(1 << 16)


def _restart_finder() -> Callable[[str, int, int], bool]:
    """Return a function that returns whether a value of the training is before an earlier value of its series."""
    latest: dict[int, int] = {}

    def is_restart(pass_name: str, number: int, step: int) -> bool:
        if pass_name != "training":
            return False
        found = step < latest.get(number, step)
        if found:
            latest.clear()
        latest[number] = step
        return found

    return is_restart


def _add_line_others(contents: RunContents, file: LineFile) -> None:
    for entry in file.others:
        try:
            if "text" in entry:
                contents.texts[str(entry["title"])] = str(entry["text"])
            elif "matrix" in entry:
                contents.matrices.append(entry)
            elif "histogram" in entry:
                fields = dict(entry["histogram"])
                for name in ("bucket_limits", "bucket_counts"):
                    fields[name] = np.array(fields[name], float)
                series = Series(entry["kind"], entry["module"], entry["pass"])
                if not any(isinstance(each, StoredValue) for each in contents.stored.get(series, ())):
                    read = ReadHistogram(int(entry["step"]), StoredHistogram(**fields))
                    contents.stored.setdefault(series, []).append(read)
        except (KeyError, TypeError, ValueError):
            contents.lost += 1
