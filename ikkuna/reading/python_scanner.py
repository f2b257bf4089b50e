"""Reads event files without the native library.

The values of a step have the same tags as those of an earlier step, almost always.
The bytes of the first such summary are therefore a template: in the others only the bytes of the numbers differ.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.reading.event_columns import OTHER_FIELDS, START_FIELDS, EventColumns
from ikkuna.reading.wire import MalformedError, fields, number
from ikkuna.visualization.files.recovery import next_head, record_spans

__all__ = ["PythonScanner"]

_HEAD, _TAIL = 12, 4  # bytes of a record before and behind its payload
_OTHERS = (3, 4, 5, 6, 8)
_LEAST_VALUES = 8  # in shorter summaries numpy is slower than a loop
_TEMPLATES = 64  # of each length


class _Template(NamedTuple):
    """The bytes of a summary with scalars only: where it is constant, where its numbers are, and their tags."""

    places: NDArray[np.intp]
    constant: NDArray[np.uint8]
    numbers: NDArray[np.intp]
    tags: NDArray[np.int32]


class PythonScanner:
    """Reads the records of an event file, one part of the file after another (see `NativeScanner`)."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._times: list[float] = []
        self._ids: dict[bytes, int] = {}
        self._tag: list[NDArray[np.int32]] = []
        self._event: list[NDArray[np.int32]] = []
        self._value: list[NDArray[np.float32]] = []
        self._others: list[tuple[int, int, int, int, int]] = []
        self._starts: list[tuple[int, int, int]] = []
        self._templates: dict[int, list[_Template]] = {}
        self._count = self._lost = 0

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
        step, time, starts = 0, 0.0, False
        scalars: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        others: list[tuple[int, int, int, int]] = []
        for field, value, at in fields(data):
            if field == 1 and isinstance(value, bytes) and len(value) == 8:
                time = number(value)
            elif field == 2 and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif field == 7 and isinstance(value, bytes):
                starts = any(key == 1 and status == 1 for key, status, _ in fields(value)) or starts
            elif field == 5 and isinstance(value, bytes):
                scalars.append(self._read_summary(value, place + at, others))
        if starts:
            self._starts.append((step, self._count, len(self._others)))
        count = sum(len(tags) for tags, _ in scalars)
        if not count and not others:
            return
        event = len(self._steps)
        self._steps.append(step)
        self._times.append(time)
        self._others += [(tag, event, kind, begin, size) for tag, kind, begin, size in others]
        for tags, values in scalars:
            self._tag.append(tags)
            self._value.append(values)
            self._event.append(np.full(len(tags), event, np.int32))
        self._count += count

    def _read_summary(
        self, data: bytes, place: int, others: list[tuple[int, int, int, int]]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return tags and values of the scalars of a summary, and append its other values to `others`."""
        array = np.frombuffer(data, np.uint8)
        for template in self._templates.get(len(data), ()):
            if np.array_equal(array[template.places], template.constant):
                return template.tags, array[template.numbers].view(np.float32)
        tags: list[int] = []
        values: list[float] = []
        numbers: list[int] = []
        others_before = len(others)
        for field, value, at in fields(data):
            if field == 1 and isinstance(value, bytes):
                name, kind, found, begin = _read_value(value)
                if kind:
                    tag = self._ids.setdefault(name, len(self._ids))
                    if kind == 2:
                        tags.append(tag)
                        values.append(found)
                        numbers.append(at + begin)
                    else:
                        others.append((tag, kind, place + at, len(value)))
        numbered = np.array(tags, np.int32)
        if len(tags) >= _LEAST_VALUES and len(others) == others_before:
            self._add_template(array, np.array(numbers, np.intp), numbered)
        return numbered, np.array(values, np.float32)

    def _add_template(self, array: NDArray[np.uint8], numbers: NDArray[np.intp], tags: NDArray[np.int32]) -> None:
        templates = self._templates.setdefault(len(array), [])
        if len(templates) < _TEMPLATES:
            every = (numbers[:, None] + np.arange(4)).ravel()
            is_constant = np.ones(len(array), bool)
            is_constant[every] = False
            places = np.flatnonzero(is_constant)
            templates.append(_Template(places, array[places], every, tags))

    def columns(self) -> EventColumns:
        """Return everything that has been read."""
        return EventColumns(
            np.array(self._steps, np.int64),
            np.array(self._times, np.float64),
            [name.decode(errors="replace") for name in self._ids],
            np.concatenate(self._tag or [np.empty(0, np.int32)]),
            np.concatenate(self._event or [np.empty(0, np.int32)]),
            np.concatenate(self._value or [np.empty(0, np.float32)]),
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


def _read_value(data: bytes) -> tuple[bytes, int, float, int]:
    """Return tag, number of the field with the value, the value of a scalar, and where its bytes are."""
    name, kind, found, begin = b"", 0, 0.0, 0
    for field, value, at in fields(data):
        if field == 1 and isinstance(value, bytes):
            name = value
        elif field == 2 and isinstance(value, bytes) and len(value) == 4:
            kind, found, begin = 2, number(value), at
        elif field in _OTHERS and isinstance(value, bytes):
            kind = field
    return name, kind, found, begin
