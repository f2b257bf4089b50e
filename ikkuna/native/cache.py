"""Stores libraries, and failures of the compiler, for the next process."""

import contextlib
import hashlib
import time
from pathlib import Path

from ikkuna.logger import log
from ikkuna.native.compiler import LIBRARY_BYTES
from ikkuna.native.private_files import private_directory, read_private_file, write_private_file

__all__ = ["LibraryCache"]

_DIGEST = hashlib.sha256().digest_size
_REASON_BYTES = 1000
_FAILURE_SECONDS = 3600.0


class LibraryCache:
    """A directory of libraries by name.

    Each file begins with the checksum of its name and of the library that follows, so a damaged file, or that of another
    name, is not used; the next :meth:`store` replaces it.
    If other users can change the directory or its parents, it is not used, and nothing is stored.

    Parameters
    ----------
    directory : Path, optional
        Created if it does not exist.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory: Path | None = None
        if directory is not None:
            try:
                self.directory = private_directory(directory)
            except OSError as error:
                log.info(
                    "the native kernels are compiled for each process, because their cache cannot be used: %s", error
                )

    def load(self, name: str) -> bytes | None:
        """Return the library of this name; ``None`` if there is none that is whole and private."""
        content = self._read(f"{name}.library", LIBRARY_BYTES + _DIGEST)
        if content is None:
            return None
        digest, library = content[:_DIGEST], content[_DIGEST:]
        return library if library and digest == _digest(name, library) else None

    def store(self, name: str, library: bytes) -> None:
        """Store a library, unless that fails."""
        self._write(f"{name}.library", _digest(name, library) + library)

    def failure(self, name: str) -> str | None:
        """Return why the compiler failed to make this library, if that was within one hour."""
        content = self._read(f"{name}.failure", _REASON_BYTES)
        if content is None:
            return None
        when, _, reason = content.decode(errors="replace").partition(" ")
        try:
            is_recent = 0 <= time.time() - float(when) < _FAILURE_SECONDS
        except ValueError:
            return None
        return reason if is_recent else None

    def store_failure(self, name: str, reason: str) -> None:
        """Store why the compiler has failed, unless that fails."""
        self._write(f"{name}.failure", f"{int(time.time())} {reason}".encode(errors="replace")[:_REASON_BYTES])

    def _read(self, name: str, limit: int) -> bytes | None:
        if self.directory is not None:
            with contextlib.suppress(OSError):
                return read_private_file(self.directory / name, limit)
        return None

    def _write(self, name: str, content: bytes) -> None:
        if self.directory is not None:
            with contextlib.suppress(OSError):  # the disk is full or read-only, for example
                write_private_file(self.directory / name, content)


def _digest(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + library).digest()
