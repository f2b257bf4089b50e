"""The base of the backends that write a file."""

import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ikkuna.backends.backend import Backend
from ikkuna.store.append_file import FileFormat
from ikkuna.store.writer import FileWriter


class WallClock:
    """The time of day in seconds, which never decreases: an adjustment of the system's clock has no effect."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return self._offset + time.monotonic()


class FileBackend(Backend):
    """Passes the values of each step as one block to a :class:`~ikkuna.store.writer.FileWriter`.

    Parameters
    ----------
    capacity : int
        Largest number of bytes that wait to be written.
    retry_seconds : float
        Pause after a failed write.
    sync_seconds : float
        Time between two calls of fsync: the most that a power failure can lose.
    fallback : bool
        Whether to continue in the directory for temporary files when the disk reports an error.

    Attributes
    ----------
    check : callable or None
        Called by the writer's thread about once a second with the directory; it must be set before the backend is opened.
    """

    def __init__(
        self,
        *,
        capacity: int = 8 * 2**20,
        retry_seconds: float = 10.0,
        sync_seconds: float = 30.0,
        fallback: bool = False,
    ) -> None:
        self._pauses = {"retry_seconds": retry_seconds, "sync_seconds": sync_seconds}
        self._capacity = capacity
        self._fallback = fallback
        self._writer: FileWriter | None = None
        self.check: Callable[[Path], None] | None = None
        self._clock = WallClock()
        self._values = 0

    @abstractmethod
    def _format(self) -> FileFormat:
        """Return the format of the file."""

    @abstractmethod
    def _take_block(self, step: int) -> bytes:
        """Return the bytes of everything added since the last call."""

    def open(self, directory: Path) -> None:
        """Create the file."""
        self._writer = self._new_writer(directory)

    def _new_writer(self, directory: Path | Callable[[], Path]) -> FileWriter:
        options: Any = {"capacity": self._capacity, "fallback": self._fallback, "check": self.check, **self._pauses}
        return FileWriter(directory, self._format(), **options)

    def open_later(self, make_directory: Callable[[], Path]) -> None:
        """Create directory and file in the writer's thread, when there is something to write."""
        if type(self).open is not FileBackend.open:
            super().open_later(make_directory)
            return
        self._writer = self._new_writer(make_directory)

    def commit(self, step: int) -> None:
        """Queue the step's block for the writer's thread."""
        block = self._take_block(step)
        values, self._values = self._values, 0
        if self._writer is not None:
            self._writer.submit(block, step, values)

    def flush(self, timeout: float | None = None) -> bool:
        """Write everything committed to the disk, and return whether that was done within `timeout` seconds."""
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Write everything committed to the disk, release the file, and return whether no value was lost."""
        return self._writer is None or self._writer.close(timeout)

    @property
    def path(self) -> Path | None:
        """The file; ``None`` before it is created."""
        return self._writer.path if self._writer else None

    @property
    def acked_step(self) -> int:
        """Last step of which the operating system has all committed values; -1 before."""
        return self._writer.acked_step if self._writer else -1

    @property
    def is_unwritable(self) -> bool:
        """Whether the last attempt to write to the file failed."""
        return self._writer is not None and self._writer.is_failing

    @property
    def dropped(self) -> int:
        """Number of values that did not reach the file."""
        return self._writer.dropped if self._writer else 0
