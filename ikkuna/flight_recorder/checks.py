"""Checks of the files of a dump, because a dump may be damaged, or be made to harm its reader."""

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import torch

from ikkuna.errors import DumpError
from ikkuna.store.checks import refused
from ikkuna.support.arrays import check_size
from ikkuna.support.files import open_regular

_DEPTH, _ITEMS = 64, 1_000_000
PLAIN = (bool, int, float, str, type(None))
"""The types of the plain values that a ``.pt`` file may contain."""


def tensor(value: Any, place: str) -> torch.Tensor:
    """Check a tensor."""
    if not isinstance(value, torch.Tensor):
        raise refused(place, "a tensor", value)
    return value


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
