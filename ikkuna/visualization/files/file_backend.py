"""What the backends that write a file of their own have in common."""

from abc import abstractmethod
from pathlib import Path

from ikkuna.visualization.backend import Backend
from ikkuna.visualization.files.file_format import FileFormat
from ikkuna.visualization.files.writer import FileWriter

__all__ = ["FileBackend"]


class FileBackend(Backend):
    """Collect the values of a step, and hand them as one block to a :class:`~ikkuna.visualization.files.writer.FileWriter`.

    Parameters
    ----------
    capacity, retry_seconds, sync_seconds, fallback : see the writer
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
        self._values = 0

    @abstractmethod
    def _format(self) -> FileFormat:
        """Return the format of the file."""

    @abstractmethod
    def _take_block(self, step: int) -> bytes:
        """Return the bytes of everything added since the last call, and forget it."""

    def open(self, directory: Path) -> None:
        """Make the file."""
        self._writer = FileWriter(
            directory, self._format(), capacity=self._capacity, fallback=self._fallback, **self._pauses
        )

    def commit(self, step: int) -> None:
        """Queue the step's block for the writer's thread."""
        block = self._take_block(step)
        values, self._values = self._values, 0
        if self._writer is not None:
            self._writer.submit(block, step, values)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed is on the disk; say whether it is."""
        return self._writer is None or self._writer.flush(timeout)

    def close(self, timeout: float | None = 2.0) -> bool:
        """Bring everything committed to the disk, and release the file."""
        return self._writer is None or self._writer.close(timeout)

    @property
    def path(self) -> Path | None:
        """The file; ``None`` before :meth:`open`."""
        return self._writer.path if self._writer else None

    @property
    def acked_step(self) -> int:
        """Last step whose bytes the operating system has; -1 before."""
        return self._writer.acked_step if self._writer else -1

    @property
    def dropped(self) -> int:
        """Number of values that did not reach the file."""
        return self._writer.dropped if self._writer else 0
