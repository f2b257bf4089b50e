"""A thread that writes dumps, so that training does not wait for the disk."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ikkuna.diagnosis.flight_recorder.dump_files import DumpContent, add_arrays, write_dump
from ikkuna.support.failures import log
from ikkuna.support.threads import BackgroundThread

__all__ = ["DumpJob", "DumpWriter"]

_WAITING = 4


class DumpJob:
    """A dump on its way to the disk.

    Parameters
    ----------
    content : DumpContent
        What to write.
    directory : callable
        Returns the directory of the dumps; called in the thread, and may create it.

    Attributes
    ----------
    path : Path or None
        The directory of the dump once it is written.
    """

    def __init__(self, content: DumpContent, directory: Callable[[], Path]) -> None:
        self._content: DumpContent | None = content
        self._directory = directory
        self._done = threading.Event()
        self.path: Path | None = None

    def run(self) -> Path:
        """Write the dump."""
        assert self._content is not None
        self.path = write_dump(self._directory(), self._content)
        return self.path

    def finish(self) -> None:
        """Release the content, and wake those who wait."""
        self._content = None
        self._done.set()

    def wait(self, timeout: float | None) -> bool:
        """Return whether the dump was written within `timeout` seconds."""
        self._done.wait(timeout)
        return self.path is not None


class DumpWriter:
    """Writes dumps in a thread, one after another.

    At most 4 wait; further ones are refused and counted.

    Attributes
    ----------
    written : list of Path
        The dumps that are on the disk.
    failed : int
        Number of dumps that were refused or could not be written.
    """

    def __init__(self) -> None:
        self.written: list[Path] = []
        self.failed = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()

    def write(self, job: DumpJob) -> None:
        """Write a dump soon."""

        def run() -> None:
            try:
                path = job.run()
                self.written.append(path)
                log.warning("the last steps are in '%s'", path)
            except Exception as error:
                self._report(error)
            finally:
                job.finish()

        if not self._add(run):
            job.finish()

    def extend(self, job: DumpJob, name: str, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Add a file to a dump after it was written."""

        def run() -> None:
            if job.path is not None:
                try:
                    add_arrays(job.path, name, arrays, facts)
                except Exception as error:
                    self._report(error)

        self._add(run)

    def _report(self, error: Exception) -> None:
        self.failed += 1
        log.error("a dump cannot be written (training is not affected): %s: %s", type(error).__name__, error)

    def _add(self, run: Callable[[], None]) -> bool:
        if len(self._jobs) >= _WAITING:
            self.failed += 1
            log.error("a dump is left out: the disk is too slow for %d others", _WAITING)
            return False
        self._jobs.append(run)
        thread = BackgroundThread(self._work, "ikkuna dumps")
        if thread.start():
            self._thread = thread
            return True
        self._jobs.pop()
        self.failed += 1
        return False

    def _work(self) -> None:
        with self._lock:
            while self._jobs:
                self._jobs[0]()
                self._jobs.popleft()

    def close(self, timeout: float) -> bool:
        """Wait for the thread, at most `timeout` seconds; return whether everything was written."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self._jobs
