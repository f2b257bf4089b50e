"""Reads event files, also while they are being written.

The values of a step have the same tags as those of an earlier step, almost always.
The bytes of the first such summary are therefore a template: in the others only the bytes of the numbers differ.
"""

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.event_records import event_library, next_head, record_spans

_FIXED = {1: 8, 5: 4}
_FORMATS = {4: "<f", 8: "<d"}


class MalformedError(ValueError):
    """These bytes are no message."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it.

    Examples
    --------
    >>> varint(bytes([0xAC, 0x02]), 0)
    (300, 2)
    """
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise MalformedError("a number is incomplete")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise MalformedError("a number has more than ten bytes")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes, int]]:
    r"""Yield number, value and position of each field of a message.

    The value is an `int` for numbers of variable length, and `bytes` for all other fields; the position is that of these bytes.

    Raises
    ------
    MalformedError
        If the bytes are no message.

    Examples
    --------
    >>> list(fields(b"\x0a\x04loss\x10\x03"))
    [(1, b'loss', 2), (2, 3, 7)]
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            begin = at
            value, at = varint(data, at)
            yield key >> 3, value, begin
            continue
        if kind == 2:
            size, at = varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise MalformedError(f"there is no type {kind}")
        if at + size > len(data):
            raise MalformedError("a field is incomplete")
        yield key >> 3, data[at : at + size], at
        at += size


def number(value: int | bytes) -> float:
    r"""Return the number in a field of four or eight bytes.

    Examples
    --------
    >>> number(b"\x00\x00\x80\x3f")
    1.0
    """
    if isinstance(value, int) or len(value) not in _FORMATS:
        raise MalformedError("expected four or eight bytes")
    found: float = struct.unpack(_FORMATS[len(value)], value)[0]
    return found


def floats(value: int | bytes) -> list[float]:
    """Return the numbers of a packed field of doubles, or that of a field with one."""
    if isinstance(value, int) or len(value) % 8:
        raise MalformedError("expected doubles")
    return list(struct.unpack(f"<{len(value) // 8}d", value))


KIND_HISTOGRAM, KIND_TENSOR = 5, 8
"""The numbers of fields of ``Summary.Value``."""
OTHER_FIELDS, START_FIELDS = 5, 3


class EventColumns(NamedTuple):
    """The values of an event file.

    Parameters
    ----------
    steps : ndarray (events,)
        The step of each event that has a value.
    times : ndarray (events,)
        The time of each event, in seconds since 1970.
    tags : list of str
        The tags.
    bounds : ndarray (tags + 1,)
        For each tag the number of scalars before its own; the last is the number of all scalars.
    event : ndarray (scalars,)
        The number of each scalar's event; scalars are grouped by their tags.
    value : ndarray (scalars,)
        The scalars, in single precision.
    others : ndarray (values, 5)
        For each other value the number of its tag, that of its event, the field of ``Summary.Value`` that has it, and the
        position and size of the ``Summary.Value`` in the file.
    starts : ndarray (sessions, 3)
        For each ``SessionLog.START`` the step from which on it replaces earlier values, and how many events and other values
        are before it.
    lost : int
        Number of damaged bytes.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    tags: list[str]
    bounds: NDArray[np.int64]
    event: NDArray[np.int32]
    value: NDArray[np.floating[Any]]
    others: NDArray[np.int64]
    starts: NDArray[np.int64]
    lost: int


_HEAD, _TAIL = 12, 4  # bytes of a record before and behind its payload
_OTHERS = (3, 4, 5, 6, 8)


class _Value(NamedTuple):
    """An entry of a summary: its tag, the number of the field with the value, a scalar's number, and where the entry is."""

    tag: bytes
    kind: int
    number: float
    place: int
    size: int


class PythonScanner:
    """Reads the records of an event file, one part of the file after another (see `NativeScanner`)."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._times: list[float] = []
        self._ids: dict[bytes, int] = {}
        self._scalars: list[tuple[int, int, float]] = []  # tag, event and value
        self._others: list[tuple[int, int, int, int, int]] = []
        self._starts: list[tuple[int, int, int]] = []
        self._lost = 0

    def scan(self, data: bytes, place: int, is_end: bool) -> int:
        """Read a part of the file, and return how many of its bytes are done with."""
        done = 0
        for begin, end in record_spans(data, is_end):
            self._lost += begin - done
            try:
                self._read_event(data[begin + _HEAD : end - _TAIL], place + begin + _HEAD)
            except MalformedError:
                self._lost += end - begin
            done = end
        rest = _incomplete(data, done)
        self._lost += rest - done
        return rest

    def _read_event(self, data: bytes, place: int) -> None:
        step, time, starts, found = 0, 0.0, False, list[_Value]()
        for field, value, at in fields(data):
            if field == 1 and isinstance(value, bytes) and len(value) == 8:
                time = number(value)
            elif field == 2 and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif field == 7 and isinstance(value, bytes):
                starts = any(key == 1 and status == 1 for key, status, _ in fields(value)) or starts
            elif field == 5 and isinstance(value, bytes):
                entries = ((entry, place + at + begin) for key, entry, begin in fields(value) if key == 1)
                found += (_read_value(entry, begin) for entry, begin in entries if isinstance(entry, bytes))
        if starts:
            self._starts.append((step, len(self._steps), len(self._others)))
        if not (found := [each for each in found if each.kind]):
            return
        event = len(self._steps)
        self._steps.append(step)
        self._times.append(time)
        for name, kind, scalar, begin, size in found:
            tag = self._ids.setdefault(name, len(self._ids))
            if kind == 2:
                self._scalars.append((tag, event, scalar))
            else:
                self._others.append((tag, event, kind, begin, size))

    def columns(self) -> EventColumns:
        """Return everything that has been read."""
        tags, events, values = zip(*self._scalars, strict=True) if self._scalars else ((), (), ())
        tag = np.array(tags, np.int32)
        order = np.argsort(tag, kind="stable")
        return EventColumns(
            np.array(self._steps, np.int64),
            np.array(self._times, np.float64),
            [name.decode(errors="replace") for name in self._ids],
            np.concatenate([[0], np.cumsum(np.bincount(tag, minlength=len(self._ids)))]),
            np.array(events, np.int32)[order],
            np.array(values, np.float32)[order],
            np.array(self._others, np.int64).reshape(-1, OTHER_FIELDS),
            np.array(self._starts, np.int64).reshape(-1, START_FIELDS),
            self._lost,
        )

    def close(self) -> None:
        """Do nothing; the native scanner frees its memory."""


def _incomplete(data: bytes, begin: int) -> int:
    """Return the position of a record of which only the beginning is there, or of the bytes in which one may begin."""
    at = begin
    while (at := next_head(data, at)) >= 0:
        if at + _HEAD + int.from_bytes(data[at : at + 8], "little") + _TAIL > len(data):
            return at
        at += 1
    return max(begin, len(data) - _HEAD + 1)


def _read_value(data: bytes, place: int) -> _Value:
    """Return an entry of a summary, which is at this place of the file; without a value its kind is 0."""
    name, kind, found = b"", 0, 0.0
    for field, value, _ in fields(data):
        if field == 1 and isinstance(value, bytes):
            name = value
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            kind, found = 2, number(value)
        elif field in _OTHERS and isinstance(value, bytes):
            kind = field
    return _Value(name, kind, found, place, len(data))


class NativeScanner:
    """Reads the records of an event file, one part of the file after another.

    Parameters
    ----------
    functions : mapping of str to function
        Those of the native library.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._functions = functions
        self._scanner = self._functions["events_open"]()
        if not self._scanner:
            raise MemoryError

    def scan(self, data: bytes, place: int, is_end: bool) -> int:
        """Read a part of the file, and return how many of its bytes are done with.

        Parameters
        ----------
        data : bytes
            The part.
        place : int
            Its position in the file.
        is_end : bool
            Whether the file ends with it.
        """
        done: int = self._functions["events_scan"](self._scanner, data, len(data), place, is_end)
        if done < 0:
            raise MemoryError
        return done

    def columns(self) -> EventColumns:
        """Return everything that has been read."""
        sizes = np.zeros(7, np.int64)
        self._functions["events_sizes"](self._scanner, sizes.ctypes.data)
        events, scalars, others, starts, tags, names_size, lost = sizes.tolist()
        steps, times = np.empty(events, np.int64), np.empty(events, np.float64)
        bounds, event = np.empty(tags + 1, np.int64), np.empty(scalars, np.int32)
        value = np.empty(scalars, np.float32)
        other = np.empty((others, OTHER_FIELDS), np.int64)
        start = np.empty((starts, START_FIELDS), np.int64)
        ends, names = np.empty(tags, np.int64), np.empty(names_size, np.uint8)
        arrays = steps, times, bounds, event, value, other, start, ends, names
        self._functions["events_copy"](self._scanner, *(array.ctypes.data for array in arrays))
        text, limits = names.tobytes(), [0, *ends.tolist()]
        found = [text[a:b].decode(errors="replace") for a, b in itertools.pairwise(limits)]
        return EventColumns(steps, times, found, bounds, event, value, other, start, lost)

    def close(self) -> None:
        """Free the memory of the scanner."""
        scanner, self._scanner = self._scanner, None
        if scanner:
            self._functions["events_close"](scanner)


def new_scanner(is_native: bool = True) -> NativeScanner | PythonScanner:
    """Return what reads the records of one event file, native where there is a library."""
    functions = event_library() if is_native else None
    return PythonScanner() if functions is None else NativeScanner(functions)


_CHUNK = 1 << 22  # so much memory is used again and again, instead of new pages


class EventFile:
    """An event file.

    Parameters
    ----------
    path : Path
        The file.
    is_native : bool
        Whether the native library may be used.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.store.event_format import float32, scalar_prefix, step_record
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "events.out.tfevents.1"
    ...     _ = path.write_bytes(step_record(scalar_prefix("loss") + float32(0.5), 3, 0.0))
    ...     columns = EventFile(path).update()
    >>> columns.tags, columns.steps.tolist(), columns.value.tolist(), columns.lost
    (['loss'], [3], [0.5], 0)
    """

    def __init__(self, path: Path, is_native: bool = True) -> None:
        self.path = path
        self._is_native = is_native
        self._scanner: NativeScanner | PythonScanner | None = None
        self._place = 0
        """How many bytes of the file are done with."""
        self.waiting = 0
        """Size of the incomplete record at the end of the file."""

    def update(self) -> EventColumns:
        """Read what has been appended since the last call, and return everything that the file contains.

        If the file has become shorter, it is read again from its beginning.

        Raises
        ------
        OSError
            If the file cannot be read.
        """
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self._scanner is None or size < self._place + self.waiting:
                self.close()
                self._scanner, self._place = new_scanner(self._is_native), 0
            file.seek(self._place)
            chunk, rest = _CHUNK, b""
            while True:
                added = file.read(chunk)
                data = rest + added
                done = self._scanner.scan(data, self._place, len(added) < chunk)
                self._place += done
                rest = data[done:]
                if len(added) < chunk:
                    break
                chunk = max(_CHUNK, len(rest))  # a record that is longer than a chunk is not read again and again
        self.waiting = len(rest)
        return self._scanner.columns()

    def close(self) -> None:
        """Free the memory."""
        if self._scanner is not None:
            self._scanner.close()
            self._scanner = None
