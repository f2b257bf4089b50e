"""A file to which blocks are appended, and which a new file replaces where it cannot be used any longer."""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ikkuna.logger import log
from ikkuna.visualization.files.append_file import AppendFile, ReplacedEnd

__all__ = ["FileFormat", "ReplaceableFile"]


class FileFormat(Protocol):
    """The format of a file."""

    def name(self, stem: str) -> str:
        """Return the file's name; `stem` is different for every writer."""

    def header(self, replaced: ReplacedEnd | None = None) -> bytes:
        """Return the first bytes of the file, by which readers ignore the end of an earlier file, if that is `replaced`."""

    def loss(self, values: int, first: int, last: int) -> bytes:
        """Return a block that reports that `values` values of the steps `first` to `last` are missing."""


class ReplaceableFile:
    """The file of a directory to which blocks are appended.

    A new file follows when this one has been deleted, when its fsync has failed, and when the directory is given up.

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

    def append(self, data: bytes) -> None:
        """Append whole blocks; if that fails, write nothing and raise `OSError`."""
        file = self._file or self._create()
        if file.deleted():
            gone, file = file, self._create()
            with contextlib.suppress(OSError):
                gone.close()
            log.warning("'%s' was deleted while it was being written; continuing in '%s'", gone.path, self.path)
        file.append(self._header + data)
        self._header = b""

    def sync(self) -> None:
        """Call fsync: afterwards the content survives a power failure."""
        if self._file is not None:
            self._file.sync()

    def replace_end(self, blocks: Sequence[bytes], first_step: int | None) -> None:
        """Write the blocks since the last successful :meth:`sync` to a new file, and continue with it if its fsync succeeds.

        The file gets its name at the end, so that whenever the process dies, readers find each block once.

        Parameters
        ----------
        blocks : sequence of bytes
            The blocks.
        first_step : int or None
            The first step that they contain; ``None`` if values of this step are also before them.
        """
        assert self._file is not None
        assert self._directory is not None
        old, replaced = self._file, ReplacedEnd(self._file.path.name, self._file.synced_size, first_step)
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
        with contextlib.suppress(OSError):  # for readers that do not know which end is replaced
            old.retract()
            old.close()
        log.warning(
            "'%s' could not be synchronised; the values since the last success are in '%s'", old.path, self.path
        )

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
