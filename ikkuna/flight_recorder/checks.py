"""Checks of what a dump contains, because a dump may be damaged, or be made to harm its reader.

A check is a function of a value and of the name of its field.  It returns the value, or raises `DumpError` with that name.
"""

import io
import os
import reprlib
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from ikkuna.errors import DumpError
from ikkuna.support.arrays import check_size
from ikkuna.support.files import open_regular

_DEPTH, _ITEMS = 64, 1_000_000
_MAX_INT = 1 << 62
PLAIN = (bool, int, float, str, type(None))
"""The types of the plain values that a ``.pt`` file may contain."""

Check = Callable[[Any, str], Any]


def _refuse(place: str, expected: str, value: object) -> DumpError:
    return DumpError(f"{place} must be {expected}, got {reprlib.repr(value)}")


# -- values -------------------------------------------------------------------------------------------------------


def integer(low: int = 0, high: int = _MAX_INT) -> Check:
    """Return a check of an int from `low` to `high`."""

    def check(value: Any, place: str) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(place, f"an int from {low} to {high}", value)
        return value

    return check


def number(value: Any, place: str) -> float:
    """Return a float; JSON has NaN and infinities as texts."""
    if (type(value) in (int, float) and abs(value) <= _MAX_INT) or type(value) is float:
        return float(value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise _refuse(place, "a number", value)


def text(value: Any, place: str) -> str:
    """Check a text."""
    if not isinstance(value, str):
        raise _refuse(place, "a text", value)
    return value


def tensor(value: Any, place: str) -> torch.Tensor:
    """Check a tensor."""
    if not isinstance(value, torch.Tensor):
        raise _refuse(place, "a tensor", value)
    return value


def plain(value: Any, place: str) -> Any:
    """Check nothing more: tensors and plain values in lists and dicts, which :func:`checked_tensors` has counted."""
    return value


def one_of(*checks: Check) -> Check:
    """Return a check of a value that one of several checks accepts; the error is that of the last one."""

    def check(value: Any, place: str) -> Any:
        for each in checks[:-1]:
            try:
                return each(value, place)
            except DumpError:
                continue
        return checks[-1](value, place)

    return check


def list_of(item: Check) -> Check:
    """Return a check of a list, and of each of its items."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple):
            raise _refuse(place, "a list", value)
        return [item(each, f"{place}[{i}]") for i, each in enumerate(value)]

    return check


def pair_of(first: Check, second: Check) -> Check:
    """Return a check of a list of two items."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise _refuse(place, "a list of two", value)
        return [first(value[0], f"{place}[0]"), second(value[1], f"{place}[1]")]

    return check


def map_of(item: Check, key: Check = text) -> Check:
    """Return a check of a dict, of its keys, and of its values."""

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(place, "a dict", value)
        return {key(name, f"a key of {place}"): item(each, f"{place}[{name!r:.60}]") for name, each in value.items()}

    return check


def record(needed: Mapping[str, Check], others: Mapping[str, Check] | Check | None = None) -> Check:
    """Return a check of a dict of named fields.

    Parameters
    ----------
    needed : mapping of str to callable
        The fields that must be there.
    others : mapping of str to callable, or callable, optional
        Fields that may be there, or the check of all further fields.  By default they are not checked.
    """

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _refuse(place, "a dict", value)
        if missing := [name for name in needed if name not in value]:
            raise DumpError(f"{place} has no field {missing[0]!r}")
        found = {}
        for name, each in value.items():
            known = needed.get(name) or (others.get(name, plain) if isinstance(others, Mapping) else others or plain)
            found[text(name, f"a field of {place}")] = known(each, f"{name!r:.60} of {place}")
        return found

    return check


# -- files --------------------------------------------------------------------------------------------------------


def open_checked(path: Path, size: int | None = None, crc32: int | None = None, limit: int | None = None) -> IO[bytes]:
    """Open a regular file for reading.

    Parameters
    ----------
    path : Path
        The file; a link to a regular file is followed, a pipe or a device is not opened.
    size, crc32 : int, optional
        What is known about its content.
    limit : int, optional
        The largest size in bytes.

    Raises
    ------
    DumpError
        If it cannot be read, is no regular file, is too large, or has another content.
    """
    try:
        file = open_regular(path)
    except (OSError, ValueError) as error:
        raise DumpError(f"'{path}' cannot be read: {getattr(error, 'strerror', error)}") from error
    try:
        found = os.fstat(file.fileno())
        if limit is not None and found.st_size > limit:
            raise DumpError(f"'{path}' is damaged: it has {found.st_size} bytes, more than {limit}")
        if (size is not None and found.st_size != size) or (crc32 is not None and _crc32(file) != crc32):
            raise DumpError(f"'{path}' is damaged: its content has changed since it was written")
        file.seek(0)
        return file
    except OSError as error:
        file.close()
        raise DumpError(f"'{path}' cannot be read: {error.strerror}") from error
    except BaseException:
        file.close()
        raise


def _crc32(file: IO[bytes]) -> int:
    found = 0
    while piece := file.read(1 << 20):
        found = zlib.crc32(piece, found)
    return found


def checked_tensors(file: IO[bytes], size: int) -> Any:
    """Return the content of a ``.pt`` file of `size` bytes, on the host: dense tensors and plain values in lists and dicts.

    Raises
    ------
    ValueError or another exception
        If it is damaged, contains something else, or becomes larger in memory.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        check_size(members, size)
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is compressed")
    file.seek(0)
    found = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
    _count(found, size)
    return found


def _count(value: Any, left: int) -> None:
    """Raise `ValueError` for too many values, as a list that contains another one many times has, and for expanded tensors."""
    waiting, items = [(value, 0)], 0
    while waiting:
        each, depth = waiting.pop()
        items += 1
        if items > _ITEMS or depth > _DEPTH:
            raise ValueError(f"it has more than {_ITEMS} values, or is nested more than {_DEPTH} times")
        if isinstance(each, torch.Tensor):
            if type(each) not in (torch.Tensor, torch.nn.Parameter) or each.layout != torch.strided or each.is_meta:
                raise ValueError(f"it contains a {type(each).__name__} of the layout {each.layout}")
            left -= each.numel() * each.itemsize
            if left < 0:
                raise ValueError("its tensors are larger than the file")
        elif isinstance(each, dict):
            waiting += [(item, depth + 1) for pair in each.items() for item in pair]
        elif isinstance(each, list | tuple):
            waiting += [(item, depth + 1) for item in each]
        elif not isinstance(each, PLAIN):
            raise ValueError(f"it contains a {type(each).__name__}")
