"""The records of event files: those of steps, their checksums, and the intact records of a damaged file.

TensorBoard ignores everything after the first corrupt byte of an event file.
This module searches for the next intact record and continues there.
It imports nothing of tensorboardX, so that reading a run does not import torch.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ikkuna.errors import ConfigError
from ikkuna.support.failures import log
from ikkuna.support.native import SOURCES, build_library, joined_source, typed_function

_HEADER = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, in reversed order of bits
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "events_checksum": ((_POINTER, _INT), ctypes.c_uint32),
    "events_open": ((), _POINTER),
    "events_close": ((_POINTER,), None),
    "events_scan": ((_POINTER, _POINTER, _INT, _INT, ctypes.c_int), _INT),
    "events_sizes": ((_POINTER, _POINTER), None),
    "events_copy": ((_POINTER,) * 10, None),
}
_CHECKED, _RIGHT = b"ikkuna reads event files", 0xE74D1761


def _functions(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    found = {name: typed_function(library, name, *types) for name, types in _FUNCTIONS.items()}
    if found["events_checksum"](_CHECKED, len(_CHECKED)) != _RIGHT:
        raise RuntimeError("the native library computes a wrong checksum")
    return found


@cache
def event_library() -> dict[str, Callable[..., Any]] | None:
    """Return the functions of the native library; ``None``, after one line in the log, if it cannot be compiled or loaded."""
    try:
        return build_library(joined_source(*SOURCES["events"]), _functions)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        log.info("event files are read by Python, which takes longer: %s", reason[0] if reason else error)
        return None


@cache
def _table() -> tuple[int, ...]:
    """Return the checksum of each byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return tuple(table.tolist())


def masked_crc32c(data: bytes) -> int:
    """Return the checksum of `data`, rotated and shifted as in a TFRecord.

    The result equals ``tensorboardX.record_writer.masked_crc32c``.

    Examples
    --------
    >>> hex(masked_crc32c(b"ikkuna"))
    '0xc29a0b7c'
    """
    if (functions := event_library()) is not None:
        return int(functions["events_checksum"](data, len(data)))
    return crc_of_bytes(data)


def crc_of_bytes(data: bytes) -> int:
    """Return what `masked_crc32c` returns, computed in Python, which takes some 350 times as long for 4 KiB."""
    table, state = _table(), 0xFFFFFFFF
    for byte in data:
        state = table[(state ^ byte) & 255] ^ state >> 8
    crc = state ^ 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    """Return `payload` as a TFRecord: its length and its bytes, each followed by their checksum."""
    return b"".join((_record_header(len(payload)), payload, _CHECKSUM.pack(masked_crc32c(payload))))


@lru_cache(1024)  # the records of many steps are equally long
def _record_header(size: int) -> bytes:
    length = _HEADER.pack(size)
    return length + _CHECKSUM.pack(masked_crc32c(length))


def varint(number: int) -> bytes:
    """Return a number as protocol buffers store it: 7 bits in each byte, the lowest first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


@lru_cache(1024)  # the entries of many steps are equally long
def _summary_header(size: int) -> bytes:
    return b"\x2a" + varint(size)  # field 5 of Event


def step_record(entries: bytes, step: int, wall_time: float) -> bytes:
    """Return the record of one event with the concatenated `entries` of its summary."""
    stamp = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step & 0xFFFFFFFFFFFFFFFF)
    return record(stamp + _summary_header(len(entries)) + entries)  # fields 1, 2 and 5: wall_time, step, summary


_HEAD, _TAIL = 12, 4  # bytes before a record's payload and after it


class Recovery(NamedTuple):
    """The result of :func:`recover`: the new file, its number of records, and the number of lost bytes."""

    path: Path
    records: int
    lost: int


def whole_records(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each record of an event file whose two checksums are correct.

    Examples
    --------
    >>> from ikkuna.store.event_format import record
    >>> first, second, third = map(record, (b"one", b"two", b"three"))
    >>> damaged = second.replace(b"w", b"W")
    >>> list(whole_records(first + damaged + third)) == [first, third]
    True
    """
    return (data[begin:end] for begin, end in record_spans(data))


def record_spans(data: bytes, is_end: bool = True) -> Iterator[tuple[int, int]]:
    """Yield the positions of the first byte of each intact record and of the byte after it.

    A length is used only if its own checksum is correct and the record lies within the data.
    In a hostile file many of these records overlap: when 16 times the size of the file has been read in records with a wrong
    checksum, only shorter records are checked.

    Parameters
    ----------
    data : bytes
        Records of an event file, perhaps with other bytes between them.
    is_end : bool
        Whether the file ends here; if not, a record that is longer than the data ends the iteration.
    """
    begin, budget = 0, 16 * len(data)
    while (begin := next_head(data, begin)) >= 0:
        end = begin + _HEAD + int.from_bytes(data[begin : begin + 8], "little") + _TAIL
        if end > len(data) and not is_end:
            return
        if end <= len(data) and end - begin <= budget:
            payload = data[begin + _HEAD : end - _TAIL]
            if masked_crc32c(payload) == int.from_bytes(data[end - _TAIL : end], "little"):
                yield begin, end
                begin = end
                continue
            budget -= end - begin
        begin += 1


def next_head(data: bytes, begin: int) -> int:
    """Return the position of the next length with a correct checksum, from `begin` on; -1 if there is none.

    Records written by ikkuna are shorter than 4 GiB, so the upper half of a length is zero.
    """
    while (zeros := data.find(b"\0\0\0\0", begin + 4)) >= 0:
        begin = zeros - 4
        head = data[begin : begin + _HEAD]
        is_length = len(head) == _HEAD and any(head[:4])
        if is_length and masked_crc32c(head[:8]) == int.from_bytes(head[8:], "little"):
            return begin
        begin += 1
    return -1


def recover(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Recovery:
    """Write the intact records of an event file to a new file, which TensorBoard can read completely.

    The damaged file is not changed.  Move it away, because TensorBoard would show both.

    Parameters
    ----------
    path : str or path-like
        The damaged file.
    to : str or path-like, optional
        The new file; by default the same name with the suffix ``.recovered``, which TensorBoard finds too.

    Raises
    ------
    ConfigError
        If the new file exists, or the damaged file has no intact record.
    """
    source = Path(path)
    target = Path(to) if to is not None else source.with_name(f"{source.name}.recovered")
    data = source.read_bytes()
    found = list(whole_records(data))
    if not found:
        raise ConfigError(f"'{source}' is not an event file: it has no intact record")
    whole = b"".join(found)
    try:
        with target.open("xb") as file:
            file.write(whole)
    except FileExistsError as error:
        raise ConfigError(f"'{target}' exists; pass another name as to=") from error
    lost = len(data) - len(whole)
    log.info("'%s': %d records are intact, %d bytes are lost; see '%s'", source, len(found), lost, target)
    return Recovery(target, len(found), lost)
