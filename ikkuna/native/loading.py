"""Loads a shared library from memory."""

import ctypes
import itertools
import os
import struct
import tempfile
from pathlib import Path

from ikkuna.native.private_files import safe_directory

__all__ = ["load_from_memory"]

_numbers = itertools.count(1)
_ELF_64 = b"\x7fELF\x02"
_HEADER = struct.Struct("=32xQQ6xHHHH2x")  # e_phoff, e_shoff, e_phentsize, e_phnum, e_shentsize, e_shnum
_SEGMENT = struct.Struct("=8xQ16xQ16x")  # p_offset, p_filesz


def load_from_memory(library: bytes) -> ctypes.CDLL:
    """Load exactly these bytes: no file is involved that could be replaced before, or truncated afterwards.

    Where the system has no files in memory, or refuses to run them, the bytes are written to a new directory that only this user
    can change.

    Raises
    ------
    OSError
        If this is not a library that the system can load.
    """
    if library[:5] == _ELF_64 and not _is_whole(library):
        raise OSError("the native library is truncated")
    try:
        descriptor = os.memfd_create("ikkuna", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(library)
            file.flush()
            # the dynamic linker returns an earlier library of the same name, and the numbers of descriptors are used again
            return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}")
    except (AttributeError, OSError):
        return _load_from_directory(library)


def _is_whole(library: bytes) -> bool:
    """Return whether all segments and the table of sections, which is at the end, lie within an ELF file.

    Loading a truncated library ends the process with SIGBUS.
    """
    if len(library) < _HEADER.size:
        return False
    segments, sections, size, count, section_size, section_count = _HEADER.unpack_from(library)
    ends: list[int] = [sections + section_size * section_count, segments + size * count]
    if max(ends) <= len(library):
        ends += [sum(_SEGMENT.unpack_from(library, segments + size * i)) for i in range(count)]
    return max(ends) <= len(library)


def _load_from_directory(library: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ikkuna-", dir=safe_directory(Path(tempfile.gettempdir()))) as directory:
        path = Path(directory) / "kernels.so"
        path.write_bytes(library)
        return ctypes.CDLL(str(path))  # a loaded library needs no file
