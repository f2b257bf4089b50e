"""Finds the files of a run, joins their values, and finds the last step."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError
from ikkuna.store.event_reader import KIND_HISTOGRAM, KIND_TENSOR, EventColumns, EventFile, new_scanner
from ikkuna.store.json_lines import LineFile, read_lines, replaced_ends
from ikkuna.store.names import Series, decode, series_of_tag, series_tag
from ikkuna.store.run_directory import RUN_FILE, read_run_file
from ikkuna.store.stored_value import (
    ReadHistogram,
    StoredHistogram,
    StoredValue,
    decode_tensor_scalar,
    decode_text,
    plugin_name,
)
from ikkuna.store.values import LISTS, ModuleEntry, read_module_table
from ikkuna.support.failures import raise_users_exception

Number = TypeVar("Number", bound=np.generic)
_LAST = np.iinfo(np.int64).max


@dataclass(slots=True)
class ValuePart:
    """The values of a file, grouped by series; those of a series are in the order in which they were written.

    Parameters
    ----------
    series : ndarray (groups,)
        The number of each group's series; -1 if its values are no series.
    bounds : ndarray (groups + 1,)
        The number of values before each group, and the number of all values.
    event : ndarray (values,)
        The number of each value's event.
    values : ndarray (values,)
        The values.
    steps, times : ndarray (events,)
        Step and time of each event.
    session : ndarray (events,)
        The number of restarts before each event.
    is_kept : ndarray (events,), optional
        Whether no restart after the event has replaced it; ``None`` if none is replaced.
    """

    series: NDArray[np.int32]
    bounds: NDArray[np.int64]
    event: NDArray[np.int32]
    values: NDArray[np.floating[Any]]
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    session: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    is_kept: NDArray[np.bool_] | None = None

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of values of each group, without replaced ones."""
        if self.is_kept is None:
            return np.diff(self.bounds)
        before = np.concatenate([[0], np.cumsum(self.is_kept[self.event])])
        return np.diff(before[self.bounds])

    def group(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return steps, values and times of a group, without replaced ones."""
        part = slice(self.bounds[number], self.bounds[number + 1])
        event, values = self.event[part], self.values[part]
        if self.is_kept is not None:
            mask = self.is_kept[event]
            event, values = event[mask], values[mask]
        return self.steps[event], values.astype(np.float64), self.times[event]

    def session_columns(
        self, session: int, wanted: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
        """Return series, steps and values of a session, one event after another; `wanted` says which series."""
        sizes = np.diff(self.bounds)
        is_wanted = np.append(wanted, False)[self.series]  # the last one is that of -1
        chosen = np.flatnonzero(np.repeat(is_wanted, sizes))
        chosen = chosen[self.session[self.event[chosen]] == session]
        chosen = chosen[np.argsort(self.event[chosen], kind="stable")]
        series = np.repeat(self.series, sizes)[chosen]
        return series, self.steps[self.event[chosen]], self.values[chosen].astype(np.float64)


def grouped(series: Sequence[int], steps: Sequence[int], values: Sequence[float], times: Sequence[float]) -> ValuePart:
    """Return values, each an event of its own, as a part."""
    numbers = np.array(series, np.int32)
    order = np.argsort(numbers, kind="stable").astype(np.int32)
    groups, sizes = np.unique(numbers, return_counts=True)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    return ValuePart(
        groups, bounds, order, np.array(values, float)[order], np.array(steps, np.int64), np.array(times, float)
    )


def mark_restarts(parts: Sequence[ValuePart], restarts: Sequence[tuple[int, int]]) -> None:
    """Set which events of the parts of one writer were replaced by restarts.

    Parameters
    ----------
    parts : sequence of ValuePart
        The parts, in the order in which they were written.
    restarts : sequence of (int, int)
        For each restart how many events of all parts are before it, and the step from which on they are replaced.

    Examples
    --------
    >>> part = grouped([0] * 5, [0, 1, 2, 1, 2], [1.0] * 5, [1.0] * 5)
    >>> mark_restarts([part], [(3, 1)])
    >>> part.session.tolist(), part.is_kept.tolist()
    ([0, 0, 0, 1, 1], [True, False, False, True, True])
    """
    places = np.array([place for place, _ in restarts], np.int64)
    replaced = np.array([step for _, step in restarts] + [_LAST], np.int64)
    first = np.minimum.accumulate(replaced[::-1])[::-1]  # the first step that any later restart replaces
    before = 0
    for part in parts:
        events = np.arange(before, before + len(part.steps))
        part.session = np.searchsorted(places, events, "right").astype(np.int32)
        limits = first[part.session]
        part.is_kept = (part.steps < limits) | (limits == _LAST) if restarts else None
        before += len(events)


class ValueTable:
    """The values of all parts by series.

    Parameters
    ----------
    parts : sequence of ValuePart
        The parts.
    count : int
        The number of series.
    """

    def __init__(self, parts: Sequence[ValuePart], count: int) -> None:
        self._parts = parts
        self._groups: list[list[tuple[ValuePart, int]]] = [[] for _ in range(count)]
        self._sizes = [0] * count
        for part in parts:
            for group, (number, size) in enumerate(zip(part.series.tolist(), part.sizes().tolist(), strict=True)):
                if number >= 0:
                    self._groups[number].append((part, group))
                    self._sizes[number] += size

    def series(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return steps, values and times of a series."""
        found = [part.group(group) for part, group in self._groups[number]]
        if len(found) == 1:
            return found[0]
        steps, values, times = zip(*found, strict=True) if found else ((), (), ())
        return _joined(steps, np.int64), _joined(values, np.float64), _joined(times, np.float64)

    def size(self, number: int) -> int:
        """Return the number of values of a series."""
        return self._sizes[number]

    def sessions(
        self, wanted: NDArray[np.bool_]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]]:
        """Yield series, steps and values of each part of the training between two restarts, in the order of steps.

        Parameters
        ----------
        wanted : ndarray (series,)
            The series to yield.
        """
        last = max((int(part.session.max(initial=0)) for part in self._parts), default=0)
        for session in range(last + 1):
            found = [part.session_columns(session, wanted) for part in self._parts]
            series = _joined([each[0] for each in found], np.int32)
            steps = _joined([each[1] for each in found], np.int64)
            values = _joined([each[2] for each in found], np.float64)
            if (np.diff(steps) < 0).any():
                order = np.argsort(steps, kind="stable")
                series, steps, values = series[order], steps[order], values[order]
            yield series, steps, values


def _joined(arrays: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, dtype)])


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
    numbered = {child for child in children if _RUN.fullmatch(child.name)}
    named = [child for child in children if child not in numbered and (child / RUN_FILE).is_file()]
    return sorted(named) + sorted(numbered, key=lambda child: (int(child.name[3:]), child.name))


_MODULES = "Text/Modules"


@dataclass
class RunContents:
    """Everything that the files of a run contain.

    Parameters
    ----------
    series : dict of Series to int
        The number of each series.
    parts : list of ValuePart
        The numbers, in the order of the files.
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
        contents.modules = _modules(columns) or getattr(read_run_file(self._path), "modules", ())
        lines = _read_lines(found.lines)
        names = {entry.name for entry in contents.modules}
        names.update(name for file in lines for _, name, _ in file.heads if name is not None)
        _add_events(contents, columns, names)
        _add_lines(contents, lines)
        return contents

    def close(self) -> None:
        """Free the memory of the files."""
        for file in self._files.values():
            file.close()


def _modules(files: list[tuple[Path, EventColumns]]) -> tuple[ModuleEntry, ...]:
    """Return the modules of the last table in event files."""
    found: tuple[ModuleEntry, ...] = ()
    for path, columns in files:
        wanted = columns.tags.index(_MODULES) if _MODULES in columns.tags else -1
        for _, _, _, place, size in columns.others[columns.others[:, 0] == wanted].tolist():
            found = read_module_table(decode_text(StoredValue(path, 0, 0.0, place, size).read()) or "") or found
    return found


def _series_of(tags: Sequence[str], names: Iterable[str]) -> list[Series | None]:
    """Return the series of tags, also of other programs; a shortened tag has its whole name if it is among `names`."""
    whole: dict[str, Series] = {}
    for head in {tag.partition("/")[0] for tag in tags if "~" in tag}:
        if (first := series_of_tag(f"{head}/_")) is not None:
            whole.update((series_tag(each), each) for each in (replace(first, name=name) for name in names))
    found: list[Series | None] = []
    for tag in tags:
        head, _, rest = tag.partition("/")
        is_own = head in ("Overview", "Dashboard", "Heatmaps", "Matrices", "Text")
        found.append(series_of_tag(tag) or whole.get(tag) or (None if is_own else Series(head, rest or None)))
    return found


def _add_events(contents: RunContents, files: list[tuple[Path, EventColumns]], names: Iterable[str]) -> None:
    """Add the values of event files, in their order, as one part; `names` are those of modules."""
    parts: list[ValuePart] = []
    restarts: list[tuple[int, int]] = []
    before = 0
    for path, columns in files:
        known = _series_of(columns.tags, names)
        is_used = np.diff(columns.bounds) > 0
        numbers = np.array(
            [
                contents.number_of(series) if series and used else -1
                for series, used in zip(known, is_used, strict=True)
            ],
            np.int32,
        )
        contents.lost += columns.lost
        restarts += [(before + place, step) for step, place, _ in columns.starts.tolist()]
        scalars = ValuePart(numbers, columns.bounds, columns.event, columns.value, columns.steps, columns.times)
        own = [scalars, _add_others(contents, path, columns, known)]
        before += sum(len(part.steps) for part in own)
        parts += own
    mark_restarts(parts, restarts)
    contents.parts += parts


def _add_others(contents: RunContents, path: Path, columns: EventColumns, known: list[Series | None]) -> ValuePart:
    """Add histograms and texts; return the scalars that are stored as tensors, as by TensorFlow."""
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
                if (text := decode_text(data)) is not None:
                    contents.texts[decode(columns.tags[tag].removeprefix("Text/"))] = text
            elif plugin == "scalars" and series is not None and (value := decode_tensor_scalar(data)) is not None:
                scalars.append((contents.number_of(series), step, value, stored.time))
    _purge_stored(contents.stored, path, columns)
    return grouped(*(zip(*scalars, strict=True) if scalars else ((), (), (), ())))


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


def _read_lines(paths: Sequence[Path]) -> list[LineFile]:
    sizes = dict(replaced_ends({path.name: _first_line(path) for path in paths}))
    return [read_lines(path, sizes.get(path.name)) for path in paths]


def _add_lines(contents: RunContents, files: Sequence[LineFile]) -> None:
    """Add the values of files of JSON lines that the event files lack, as one part."""
    known = set(contents.series)
    columns: list[tuple[int, int, float, float]] = []
    restarts: list[tuple[int, int]] = []
    is_restart = _restart_finder()
    for file in files:
        contents.lost += file.lost
        contents.waiting += file.waiting
        series = [Series(*head) for head in file.heads]
        numbers = [-1 if each in known else contents.number_of(each) for each in series]
        resumed = file.restarts[::-1]
        for place, (i, step, value, time) in enumerate(
            zip(file.series, file.steps, file.values, file.times, strict=True)
        ):
            while resumed and resumed[-1][0] == place:
                restarts.append((len(columns), resumed.pop()[1]))
            if numbers[i] >= 0:
                if is_restart(series[i].pass_name, numbers[i], step):
                    restarts.append((len(columns), step))
                columns.append((numbers[i], step, value, time))
        restarts += [(len(columns), step) for _, step in reversed(resumed)]
        _add_line_others(contents, file)
    if columns:
        numbers_, steps, values, times = zip(*columns, strict=True)
        part = grouped(numbers_, steps, values, times)
        mark_restarts([part], restarts)
        contents.parts.append(part)


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
            if isinstance(resumed := entry.get("resumed"), int):
                contents.matrices = [each for each in contents.matrices if each["step"] < resumed]
                for series, found in contents.stored.items():
                    kept = (each for each in found if isinstance(each, StoredValue) or each.step < resumed)
                    contents.stored[series] = list(kept)
            elif "text" in entry:
                contents.texts[str(entry["title"])] = str(entry["text"])
            elif "matrix" in entry:
                contents.matrices.append({**entry, "step": int(entry["step"])})
            elif "histogram" in entry:
                fields = dict(entry["histogram"])
                for name in LISTS:
                    fields[name] = np.array(fields[name], float)
                series = Series(entry["kind"], entry["module"], entry["pass"])
                if not any(isinstance(each, StoredValue) for each in contents.stored.get(series, ())):
                    read = ReadHistogram(int(entry["step"]), StoredHistogram(**fields))
                    contents.stored.setdefault(series, []).append(read)
        except (KeyError, TypeError, ValueError):
            contents.lost += 1


_TAIL = 2**20  # bytes


def last_step(directory: Path) -> int:
    """Return the last step with a value in the files of a run; -1 if there is none.

    Only the last mebibyte of each file is read.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.store.names import Series
    >>> from ikkuna.backends.jsonl import JSONLinesBackend
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     backend = JSONLinesBackend()
    ...     backend.open(Path(directory))
    ...     backend.add_scalar(Series("loss"), 0.5, 12)
    ...     backend.commit(12)
    ...     backend.close(), last_step(Path(directory))
    (True, 12)
    """
    events = [_last_of_events(_tail(file)) for file in sorted(directory.glob("events.out.tfevents.*"))]
    lines = [_last_of_lines(_tail(file)) for file in sorted(directory.glob("values.*.jsonl"))]
    last = [next((step for step in reversed(steps) if step >= 0), -1) for steps in (events, lines)]
    return max(last)


def _tail(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _TAIL, 0))
        return stream.read()


def _last_of_events(data: bytes) -> int:
    """Return the step of the last record with a number; images are written later than the values of their steps."""
    scanner = new_scanner()
    scanner.scan(data, 0, True)
    found = scanner.columns()
    scanner.close()
    return int(found.steps[found.event.max()]) if len(found.event) else -1


def _last_of_lines(data: bytes) -> int:
    for line in reversed(data.splitlines()):
        try:
            entry = json.loads(line)
            if "kind" in entry:
                return int(entry["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise_users_exception(error)
            continue
    return -1
