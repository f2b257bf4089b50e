"""A file that only grows by whole blocks."""

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
    | os.O_EXCL  # another writer's file is never touched
    | os.O_APPEND
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)  # nor is a symbolic link in a shared directory followed
    | getattr(os, "O_BINARY", 0)
)


def unique_stem(counter: int) -> str:
    """Return time, host, process and `counter`: what tells this writer's file from any other's."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:64] or "localhost"
    return f"{int(time.time()):010d}.{host}.{os.getpid()}.{counter}"


def reason(error: OSError) -> str:
    """Return what went wrong with a directory, in words."""
    if isinstance(error, FileExistsError):
        return "it exists and is not a directory"
    return error.strerror or str(error)


def _sync_directory(directory: Path) -> None:
    """Make the entry of a new file as durable as its content; not every file system can."""
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
    """A new file, made exclusively below `directory`, whose content is at every moment a sequence of whole blocks.

    One block is one ``write``.  There is no buffer of ours: what :meth:`append` has taken, the operating system has,
    and it survives the death of this process.

    Parameters
    ----------
    directory : made if it does not exist
    name : the file's name for a stem that is different for every writer (see :func:`unique_stem`)

    Raises
    ------
    LogDirError
        If the file cannot be made, with the reason; found out by making it.
    """

    def __init__(self, directory: Path, name: Callable[[str], str]) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.path, self._descriptor = self._create(directory, name)
        except OSError as error:
            raise LogDirError(f"cannot write to log directory '{directory}': {reason(error)}") from error
        self._size = 0
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
        raise AssertionError("a count has no end")

    def append(self, block: bytes) -> None:
        """Write `block` whole or not at all; raise `OSError` in the second case."""
        self._mend()
        self._torn = True
        written = os.write(self._descriptor, block)
        if written != len(block):
            self._mend()
            raise OSError(errno.ENOSPC, f"only {written} of {len(block)} bytes were written")
        self._torn = False
        self._size += written

    def _mend(self) -> None:
        """Cut off the part of a block that was written before an error."""
        if self._torn:
            os.ftruncate(self._descriptor, self._size)
            self._torn = False

    def sync(self) -> None:
        """Wait until the content would survive a power failure."""
        os.fsync(self._descriptor)

    def deleted(self) -> bool:
        """Say whether the file has lost its name, so that nobody will ever read what is written to it."""
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            if error.errno == errno.ESTALE:  # how a network file system says it
                return True
            raise

    def close(self) -> None:
        """Release the descriptor; cut off a torn block if that has not been possible before."""
        try:
            self._mend()
        finally:
            os.close(self._descriptor)
