"""The wire format of Protocol Buffers: the fields of a message, without its description."""

import struct
from collections.abc import Iterator

__all__ = ["MalformedError", "fields", "floats", "number", "varint"]

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
