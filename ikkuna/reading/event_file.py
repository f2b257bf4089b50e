"""Reads one event file, also while it is being written."""

import os
from pathlib import Path

from ikkuna.reading.event_columns import EventColumns
from ikkuna.reading.native_scanner import NativeScanner, event_library
from ikkuna.reading.python_scanner import PythonScanner

__all__ = ["EventFile"]

_CHUNK = 1 << 25


class EventFile:
    """An event file.

    Parameters
    ----------
    path : Path
        The file.
    is_native : bool
        Whether the native library may be used.

    Examples
    --------
    >>> import tempfile
    >>> from ikkuna.visualization.files.event_file import float32, scalar_prefix, step_record
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "events.out.tfevents.1"
    ...     _ = path.write_bytes(step_record(scalar_prefix("loss") + float32(0.5), 3, 0.0))
    ...     columns = EventFile(path).update()
    >>> columns.tags, columns.steps.tolist(), columns.value.tolist(), columns.lost
    (['loss'], [3], [0.5], 0)
    """

    def __init__(self, path: Path, is_native: bool = True) -> None:
        self.path = path
        self._is_native = is_native
        self._scanner: NativeScanner | PythonScanner | None = None
        self._place = 0
        """How many bytes of the file are done with."""
        self.waiting = 0
        """Size of the incomplete record at the end of the file."""

    def update(self) -> EventColumns:
        """Read what has been appended since the last call, and return everything that the file contains.

        If the file has become shorter, it is read again from its beginning.

        Raises
        ------
        OSError
            If the file cannot be read.
        """
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if self._scanner is None or size < self._place + self.waiting:
                self.close()
                self._scanner, self._place = self._new_scanner(), 0
            file.seek(self._place)
            chunk, rest = _CHUNK, b""
            while True:
                added = file.read(chunk)
                data = rest + added
                done = self._scanner.scan(data, self._place, len(added) < chunk)
                self._place += done
                rest = data[done:]
                if len(added) < chunk:
                    break
                chunk = max(_CHUNK, len(rest))  # a record that is longer than a chunk is not read again and again
        self.waiting = len(rest)
        return self._scanner.columns()

    def _new_scanner(self) -> NativeScanner | PythonScanner:
        library = event_library() if self._is_native else None
        return PythonScanner() if library is None else NativeScanner(library)

    def close(self) -> None:
        """Free the memory."""
        if self._scanner is not None:
            self._scanner.close()
            self._scanner = None
