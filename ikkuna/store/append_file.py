"""Files to which whole blocks are appended, and which a new file replaces where they cannot be used any more."""

import contextlib
import errno
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ikkuna.errors import LogDirError
from ikkuna.support.failures import log
from ikkuna.support.files import NEW_FILE, synchronise_directory

_FLAGS = NEW_FILE | os.O_APPEND


def unique_stem(second: int, counter: int) -> str:
    """Return `second`, host, process and `counter`, which together are different for every writer."""
    return f"{second:010d}.{process_name()}.{counter:03d}"


def process_name() -> str:
    """Return the name of this machine and the number of this process."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:64] or "localhost"
    return f"{host}.{os.getpid()}"


def _first_second(directory: Path, name: Callable[[str], str]) -> int:
    """Return the least second for the name of a file that follows all such files of a directory; 0 if there are none.

    Readers sort the files of a run by their names.  A run can be resumed within a second, by a machine with another clock, or
    after the clock has been set back.  Of the files of this process, a counter puts those of one second in order.
    """
    prefix, suffix = name("\0").split("\0")
    own, first = f".{process_name()}.", 0
    for entry in os.listdir(directory):
        stem = entry.removeprefix(prefix).removesuffix(suffix)
        second = stem.partition(".")[0]
        if entry == f"{prefix}{stem}{suffix}" and second.isdecimal() and len(second) == 10:
            first = max(first, int(second) + (own not in stem))
    return first


def reason(error: OSError) -> str:
    """Return the reason of an error of a directory."""
    if isinstance(error, FileExistsError):
        return "it exists and is not a directory"
    return error.strerror or str(error)


def make_directories(directory: Path) -> None:
    """Create a directory and its parents; unlike those of the standard library, without recursion."""
    with contextlib.suppress(FileNotFoundError):
        directory.mkdir(exist_ok=True)
        return
    for path in (*reversed(directory.parents), directory):
        path.mkdir(exist_ok=True)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class ReplacedEnd(NamedTuple):
    """The end of an earlier file in the same directory, which a file replaces.

    Parameters
    ----------
    name : str
        The name of the earlier file.
    size : int
        How many of its first bytes remain valid.
    step : int or None
        The first step that the end contains, and nothing before it; ``None`` if there is no such step.
    """

    name: str
    size: int
    step: int | None


class AppendFile:
    """A new file below `directory` whose content is always a sequence of whole blocks.

    Each block is one ``write`` without a buffer in this process.
    When :meth:`append` returns, the operating system has the block, and it survives the death of this process.
    If other code of the process closes the descriptor, its number may be used for another file.  It is therefore compared
    with the file before each use, and the file is opened again if they differ.

    Parameters
    ----------
    directory : Path
        Created if it does not exist.
    name : callable
        Returns the file's name for a stem that is different for every writer (see :func:`unique_stem`).
    following : AppendFile, optional
        A file after which readers read this one, because its name is later.
        Until :meth:`publish` is called, this file has another name, by which no reader finds it.

    Attributes
    ----------
    final_size : int
        The size up to which no block is written again to another file; see :meth:`finish`.

    Raises
    ------
    LogDirError
        If the file cannot be created, with the reason.
    """

    def __init__(self, directory: Path, name: Callable[[str], str], following: "AppendFile | None" = None) -> None:
        self._second, self._counter = int(time.time()), 0
        if following is not None and following._second >= self._second:
            self._second, self._counter = following._second, following._counter + 1
        try:
            make_directories(directory)
            self._second = max(self._second, _first_second(directory, name))
            self._name, self.path, self._descriptor = self._create(directory, name, following is not None)
        except OSError as error:
            raise LogDirError(f"cannot write to log directory '{directory}': {reason(error)}") from error
        self._identity = _identity(self._descriptor)
        self._size = self.final_size = 0
        self._torn = False
        synchronise_directory(directory)

    def _create(self, directory: Path, name: Callable[[str], str], is_hidden: bool) -> tuple[str, Path, int]:
        for counter in itertools.count(self._counter):
            self._counter = counter
            stem = unique_stem(self._second, counter)
            final = name(stem)
            if is_hidden and (directory / final).exists():
                continue
            # TensorBoard reads every file with ``tfevents`` in its name
            path = directory / (f".unfinished.{stem}" if is_hidden else final)
            with contextlib.suppress(FileExistsError):
                return final, path, os.open(path, _FLAGS, 0o644)
        raise AssertionError("unreachable")

    def publish(self) -> None:
        """Give a hidden file its name; raise `FileExistsError` if another file has got it."""
        path = self.path.with_name(self._name)
        if path.exists():
            raise FileExistsError(errno.EEXIST, "another file has this name", str(path))
        os.rename(self.path, path)
        self.path = path
        synchronise_directory(path.parent)

    def append(self, block: bytes) -> None:
        """Write the whole block; if that fails, write nothing and raise `OSError`."""
        self._reopen()
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
            self._shorten(self._size)
            self._torn = False

    def _shorten(self, size: int) -> None:
        """Truncate the file to `size` bytes; it is not extended if another process has truncated it further."""
        self._reopen()
        os.ftruncate(self._descriptor, min(size, os.fstat(self._descriptor).st_size))

    def sync(self) -> None:
        """Call fsync: afterwards the content survives a power failure."""
        self._reopen()
        os.fsync(self._descriptor)

    def finish(self, kept: int) -> None:
        """Remember that, except for the last `kept` bytes, no block is written again to another file."""
        self.final_size = self._size - kept

    def retract(self) -> None:
        """Remove what follows :attr:`final_size`, because another file contains it."""
        self._shorten(self.final_size)
        self._size = self.final_size

    def delete(self) -> None:
        """Delete the file."""
        os.unlink(self.path)
        os.close(self._descriptor)

    def deleted(self) -> bool:
        """Return whether the file has been deleted, so that nothing written to it can be read."""
        try:
            self._reopen()
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # network file systems report ESTALE
                return True
            raise

    def _is_open(self) -> bool:
        try:
            return _identity(self._descriptor) == self._identity
        except OSError as error:
            if error.errno == errno.EBADF:
                return False
            raise

    def _reopen(self) -> None:
        """Open the file again if its descriptor has been closed; raise `FileNotFoundError` if it has been deleted."""
        if self._is_open():
            return
        descriptor = os.open(self.path, _FLAGS & ~os.O_CREAT & ~os.O_EXCL)
        if _identity(descriptor) != self._identity:
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "another file has this name", str(self.path))
        self._descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor; before, remove a torn block if that failed earlier."""
        try:
            self._cut_torn_block()
        finally:
            if self._is_open():
                os.close(self._descriptor)


class FileFormat(Protocol):
    """The format of a file."""

    @property
    def replaces_bytes(self) -> bool:
        """Whether :meth:`header` names the bytes that are replaced; otherwise it names the first step that is replaced."""

    def name(self, stem: str) -> str:
        """Return the file's name; `stem` is different for every writer."""

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        """Return the first bytes of the file, by which readers ignore the end of an earlier file, if that is `replaced`."""

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return a block that reports that `values` values of the steps `first` to `last` are missing."""


class ReplaceableFile:
    """The file of a directory to which blocks are appended.

    A new file follows when this one has been deleted, when its fsync has failed, and when the directory is given up.
    The blocks that may have to be written again are therefore always at the end of one file.

    Parameters
    ----------
    directory : Path or callable
        Created if it does not exist.  If it is a function that returns a directory, the file is created by the first
        :meth:`append`; with a path at once.
    file_format : FileFormat
        Name and header.

    Raises
    ------
    LogDirError
        If the file cannot be created at once.
    """

    def __init__(self, directory: Path | Callable[[], Path], file_format: FileFormat) -> None:
        self._make_directory = directory if callable(directory) else None
        self._directory = directory if isinstance(directory, Path) else None
        self._format = file_format
        self._file: AppendFile | None = None
        self._header = b""  # is written with the first block
        if self._directory is not None:
            self._create()

    @property
    def path(self) -> Path | None:
        """The file that exists now; ``None`` before it is created."""
        return None if self._file is None else self._file.path

    @property
    def label(self) -> str:
        """The path, or the name with a star before the file is created, for log lines."""
        return str(self.path or self._format.name("*"))

    def _create(self) -> AppendFile:
        if self._directory is None:
            assert self._make_directory is not None
            self._directory, self._make_directory = self._make_directory(), None
        self._file, self._header = AppendFile(self._directory, self._format.name), self._format.header()
        return self._file

    def append(self, data: bytes) -> bool:
        """Append whole blocks; if that fails, write nothing and raise `OSError`.

        Return ``False`` if the file has been deleted, so that nothing written to it can be read.
        """
        file = self._file or self._create()
        if file.deleted():
            return False
        file.append(self._header + data)
        self._header = b""
        return True

    def sync(self) -> None:
        """Call fsync: afterwards the content survives a power failure."""
        if self._file is not None:
            self._file.sync()

    def finish(self, kept: int) -> None:
        """Remember that, except for the last `kept` bytes, no block is written again to another file."""
        if self._file is not None:
            self._file.finish(kept)

    def replace_end(self, blocks: Sequence[bytes], first_step: int | None, why: str) -> bool:
        """Write all blocks after :meth:`finish` to a new file, and continue with it if its fsync succeeds.

        The file gets its name at the end, so that whenever the process dies, readers find each block once.

        Parameters
        ----------
        blocks : sequence of bytes
            The blocks.
        first_step : int or None
            The first step that they contain; ``None`` if there are none.
        why : str
            What has happened to the earlier file, for the log.

        Returns
        -------
        bool
            Whether the blocks have been removed from the end of the earlier file, for readers that do not know which end is
            replaced.
        """
        assert self._file is not None
        assert self._directory is not None
        old, replaced = self._file, ReplacedEnd(self._file.path.name, self._file.final_size, first_step)
        file = AppendFile(self._directory, self._format.name, following=old)
        try:
            file.append(self._format.header(replaced) + b"".join(blocks))
            file.sync()
            file.publish()
        except OSError:
            with contextlib.suppress(OSError):
                file.delete()
            raise
        self._file, self._header = file, b""
        is_clean = True
        try:
            old.retract()
        except OSError as error:
            is_clean = isinstance(error, FileNotFoundError)
        with contextlib.suppress(OSError):
            old.close()
        log.warning("'%s' %s; the values since the last success are in '%s'", old.path, why, self.path)
        return is_clean

    def move_to_temporary_directory(self) -> bool:
        """Continue in a new file in a directory for temporary files; return ``False`` if that is impossible, too."""
        gone, home, label = self._file, self._directory, self.label
        try:
            self._directory = Path(tempfile.mkdtemp(prefix=f"ikkuna-{home.name if home else 'run'}-"))
            self._create()
        except OSError:
            self._directory = home
            return False
        if gone is not None:
            with contextlib.suppress(OSError):
                gone.close()
        log.error("'%s' is abandoned; continuing in '%s'", label, self.path)
        return True

    def close(self) -> None:
        """Release the file; an error is ignored."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
