r"""The file of the values that rules have read, in double precision, so that they can be judged again.

The file ``rule_values.*.f64`` lies beside the values of the run.  All numbers are little-endian.
It begins with the eight bytes ``IKKUNA\0\1`` and consists of records:

=========== ============ ===========================================================================
bytes       type         content
=========== ============ ===========================================================================
0 to 3      uint32       the size of the content
4 to 7      uint32       its CRC-32 (as `zlib.crc32`)
8           1 character  what it is
9 and later              see below
=========== ============ ===========================================================================

========= ==============================================================================================
character content
========= ==============================================================================================
``G``     uint32 number of a group, JSON with the ``kind``, ``pass`` and ``names`` of its series
``M``     JSON with the modules: ``name``, ``class``, ``parameters``
``V``     int64 step at whose end the rules judged, then for each group with values: uint32 number,
          uint32 count of values, int64 their step, and the values as float64
``R``     int64 step: the training went back, and this step and later ones are repeated
``L``     int64 number of lost values, first and last step
``E``     JSON with ``replaces`` and ``size``: the end of an earlier file, from this size on, is in this one
========= ==============================================================================================
"""

import json
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.names import SeriesGroup
from ikkuna.store.values import ModuleEntry

ReadValues = tuple[SeriesGroup, NDArray[np.float64], int]
"""Values that rules have read: of which series, and at which step they were published."""

_MAGIC = b"IKKUNA\0\1"
_HEAD = struct.Struct("<II")
_NUMBER = struct.Struct("<I")
_STEP = struct.Struct("<q")
_GROUP = struct.Struct("<IIq")
_BEGINNING = 1 << 22  # bytes
_LOSS = struct.Struct("<qqq")


def _record(kind: bytes, content: bytes) -> bytes:
    content = kind + content
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _json_record(kind: bytes, value: Any) -> bytes:
    return _record(kind, json.dumps(value).encode())


class RuleValuesFormat:
    """The format of the file: the bytes of each record.

    The header of each file defines all groups so far, so that it can be read if an earlier file was deleted.
    """

    replaces_bytes = True

    def __init__(self) -> None:
        self._definitions: list[bytes] = []
        self._numbers: dict[tuple[str, str, tuple[str | None, ...]], int] = {}
        self._known: WeakKeyDictionary[SeriesGroup, int] = WeakKeyDictionary()

    def name(self, stem: str) -> str:
        """Return the name of the file."""
        return f"rule_values.{stem}.f64"

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        """Return the first bytes of a file."""
        end = b"" if replaced is None else _json_record(b"E", {"replaces": replaced.name, "size": replaced.size})
        return b"".join((_MAGIC, end, *list(self._definitions)))

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return a record that reports lost values."""
        return _record(b"L", _LOSS.pack(values, first, last))

    def modules(self, modules: Sequence[ModuleEntry]) -> bytes:
        """Return a record with the modules."""
        found = [
            {"name": m.name, "class": m.class_name, "parameters": m.parameters, "source": m.source} for m in modules
        ]
        self._definitions.append(record := _json_record(b"M", found))
        return record

    def group(self, group: SeriesGroup) -> bytes:
        """Return the record that defines a group; empty if it is defined already."""
        if group in self._known:
            return b""
        key = group.kind, group.pass_name, group.names
        if key in self._numbers:
            self._known[group] = self._numbers[key]
            return b""
        number = self._known[group] = self._numbers[key] = len(self._definitions)
        named = {"kind": group.kind, "pass": group.pass_name, "names": group.names}
        self._definitions.append(record := _record(b"G", _NUMBER.pack(number) + json.dumps(named).encode()))
        return record

    def step(self, step: int, read: Iterable[ReadValues]) -> bytes:
        """Return the record of a step at whose end the rules judged, behind the definitions of groups that are new."""
        definitions, entries = [], [_STEP.pack(step)]
        for group, values, at in read:
            if group not in self._known:
                definitions.append(self.group(group))
            entries.append(_GROUP.pack(self._known[group], len(values), at))
            entries.append(np.ascontiguousarray(values, "<f8").tobytes())
        return b"".join((*definitions, _record(b"V", b"".join(entries))))

    @staticmethod
    def resumed(step: int) -> bytes:
        """Return the record of a training that goes back to a step."""
        return _record(b"R", _STEP.pack(step))

    @property
    def definitions(self) -> bytes:
        """All definitions so far, to be repeated after a loss."""
        return b"".join(self._definitions)


class ValueGroup(NamedTuple):
    """The values of the series of a kind and pass at a step."""

    kind: str
    pass_name: str
    names: list[str | None]
    step: int
    values: list[float]


class RuleValues(NamedTuple):
    """The values that rules have read while a model trained.

    Parameters
    ----------
    modules : tuple of ModuleEntry
        The observed modules.
    kinds : frozenset of str
        The kinds with values.
    sessions : list of tuple
        For each part of the training between two resumptions the step at which it begins, ``None`` for the first one, and a list
        with each judged step and its values.
    lost : int
        Number of lost values and damaged records.
    """

    modules: tuple[ModuleEntry, ...]
    kinds: frozenset[str]
    sessions: list[tuple[int | None, list[tuple[int, list[ValueGroup]]]]]
    lost: int


class _Builder:
    """Collects the records of files."""

    def __init__(self) -> None:
        self.modules: tuple[ModuleEntry, ...] = ()
        self.sessions: list[tuple[int | None, list[tuple[int, list[ValueGroup]]]]] = [(None, [])]
        self.lost = 0
        self._groups: dict[int, tuple[str, str, list[str | None]]] = {}

    def add_file(self, content: bytes) -> None:
        """Add the records of a file."""
        self._groups = {}
        for kind, data in _records(content):
            match kind:
                case b"G":
                    named = json.loads(data[_NUMBER.size :])
                    self._groups[_NUMBER.unpack_from(data)[0]] = named["kind"], named["pass"], named["names"]
                case b"M":
                    self.modules = tuple(_module(each) for each in json.loads(data))
                case b"V":
                    entries = list(_entries(data, self._groups))
                    known = [entry for entry in entries if entry is not None]
                    self.lost += len(entries) - len(known)
                    self.sessions[-1][1].append((_STEP.unpack_from(data)[0], known))
                case b"R":
                    self.sessions.append((_STEP.unpack(data)[0], []))
                case b"L":
                    self.lost += _LOSS.unpack(data)[0]
                case b"":
                    self.lost += 1


def read_rule_values(directory: Path) -> RuleValues | None:
    """Return the values that rules have read, from the files in the directory of a run; ``None`` if there are none.

    A damaged record is skipped and counted; what follows an incomplete record of a file is not read.
    """
    contents = {path.name: path.read_bytes() for path in sorted(directory.glob("rule_values.*.f64"))}
    if not contents:
        return None
    ends = [json.loads(data) for content in contents.values() for kind, data in _records(content) if kind == b"E"]
    for end in ends:
        contents[end["replaces"]] = contents.get(end["replaces"], b"")[: end["size"]]
    found = _Builder()
    for content in contents.values():
        found.add_file(content)
    kinds = frozenset(group.kind for _, steps in found.sessions for _, groups in steps for group in groups)
    return RuleValues(found.modules, kinds, found.sessions, found.lost)


def first_values(directory: Path, kinds: Collection[str]) -> dict[str, float]:
    """Return the values of the network at the first step that has some kinds; empty without such a step.

    Only the first four mebibytes of each file are read.
    """
    for path in sorted(directory.glob("rule_values.*.f64")):
        groups: dict[int, tuple[str, str, list[str | None]]] = {}
        with path.open("rb") as file:
            content = file.read(_BEGINNING)
        for kind, data in _records(content):
            if kind == b"G":
                named = json.loads(data[_NUMBER.size :])
                groups[_NUMBER.unpack_from(data)[0]] = named["kind"], named["pass"], named["names"]
            elif kind == b"V":
                found = {e.kind: e.values[0] for e in _entries(data, groups) if e is not None and e.names == [None]}
                if found.keys() >= set(kinds):
                    return found
    return {}


def _records(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the character and the content of each record of a file; a damaged one has neither."""
    place = len(_MAGIC)
    if content[:place] != _MAGIC:
        return
    while place + _HEAD.size <= len(content):
        size, checksum = _HEAD.unpack_from(content, place)
        data = content[place + _HEAD.size : place + _HEAD.size + size]
        if len(data) < size:
            return
        place += _HEAD.size + size
        yield (data[:1], data[1:]) if zlib.crc32(data) == checksum else (b"", b"")


def _entries(data: bytes, groups: dict[int, tuple[str, str, list[str | None]]]) -> Iterator[ValueGroup | None]:
    """Yield the values of each group in a step; ``None`` for a group whose definition was lost."""
    place = _STEP.size
    while place < len(data):
        number, count, step = _GROUP.unpack_from(data, place)
        values = np.frombuffer(data, "<f8", count, place + _GROUP.size).tolist()
        place += _GROUP.size + 8 * count
        yield ValueGroup(*groups[number], step, values) if number in groups else None


def _module(stored: dict[str, Any]) -> ModuleEntry:
    parameters = tuple((name, None if shape is None else tuple(shape)) for name, shape in stored["parameters"])
    return ModuleEntry(stored["name"], stored["class"], parameters, source=stored.get("source", ""))
