"""A file to which whole blocks are appended."""

import errno
import itertools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ikkuna.errors import LogDirError

__all__ = ["AppendFile", "reason", "unique_stem"]

_FLAGS = (
    os.O_WRONLY
    | os.O_CREAT
    | os.O_EXCL  # never open another writer's file
    | os.O_APPEND
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)  # never follow a symbolic link in a shared directory
    | getattr(os, "O_BINARY", 0)
)


def unique_stem(counter: int) -> str:
    """Return time, host, process and `counter`, which together are different for every writer."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:64] or "localhost"
    return f"{int(time.time()):010d}.{host}.{os.getpid()}.{counter}"


def reason(error: OSError) -> str:
    """Return the reason of an error of a directory."""
    if isinstance(error, FileExistsError):
        return "it exists and is not a directory"
    return error.strerror or str(error)


def _sync_directory(directory: Path) -> None:
    """Synchronise a directory, so that the entry of a new file is durable; not all file systems support this."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


class AppendFile:
    """A new file below `directory` whose content is always a sequence of whole blocks.

    Each block is one ``write`` without a buffer in this process.
    When :meth:`append` returns, the operating system has the block, and it survives the death of this process.

    Parameters
    ----------
    directory : Path
        Created if it does not exist.
    name : callable
        Returns the file's name for a stem that is different for every writer (see :func:`unique_stem`).

    Raises
    ------
    LogDirError
        If the file cannot be created, with the reason.
    """

    def __init__(self, directory: Path, name: Callable[[str], str]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = self._create(directory, name)
        except OSError as error:
            raise LogDirError(f"cannot write to log directory '{directory}': {reason(error)}") from error
        self._size = self._synced_size = 0
        self._torn = False
        _sync_directory(directory)

    @staticmethod
    def _create(directory: Path, name: Callable[[str], str]) -> tuple[Path, int]:
        for counter in itertools.count():
            path = directory / name(unique_stem(counter))
            try:
                return path, os.open(path, _FLAGS, 0o644)
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    def append(self, block: bytes) -> None:
        """Write the whole block; if that fails, write nothing and raise `OSError`."""
        self._cut_torn_block()
        self._torn = True
        written = os.write(self._descriptor, block)
        if written != len(block):
            self._cut_torn_block()
            raise OSError(errno.ENOSPC, f"only {written} of {len(block)} bytes were written")
        self._torn = False
        self._size += written

    def _cut_torn_block(self) -> None:
        """Remove the part of a block that was written before an error."""
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False

    def sync(self) -> None:
        """Call fsync: afterwards the content survives a power failure."""
        os.fsync(self._descriptor)
        self._synced_size = self._size

    def retract(self) -> None:
        """Remove the blocks that have been appended since the last successful :meth:`sync`."""
        os.ftruncate(self._descriptor, self._synced_size)
        self._size = self._synced_size

    def delete(self) -> None:
        """Delete the file."""
        os.unlink(self.path)
        os.close(self._descriptor)

    def deleted(self) -> bool:
        """Return whether the file has been deleted, so that nothing written to it can be read."""
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            if error.errno == errno.ESTALE:  # reported by network file systems
                return True
            raise

    def close(self) -> None:
        """Close the descriptor; before, remove a torn block if that failed earlier."""
        try:
            self._cut_torn_block()
        finally:
            os.close(self._descriptor)
