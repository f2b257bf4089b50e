"""A thread that writes dumps, so that training does not wait for the disk."""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ikkuna.diagnosis.flight_recorder.dump_files import DumpContent, add_arrays, write_dump
from ikkuna.support.failures import log
from ikkuna.support.threads import Worker

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
    is_finished : bool
        Whether it was written or given up.
    """

    def __init__(self, content: DumpContent, directory: Callable[[], Path]) -> None:
        self._content: DumpContent | None = content
        self._directory = directory
        self.path: Path | None = None
        self.is_finished = False

    def run(self) -> Path:
        """Write the dump."""
        assert self._content is not None
        self.path = write_dump(self._directory(), self._content)
        return self.path

    def finish(self) -> None:
        """Release the content."""
        self._content = None
        self.is_finished = True


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
        self._worker = Worker("ikkuna dumps", lambda: self._run_first if self._jobs else None)

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
        if len(self._jobs) >= _WAITING or not self._worker.is_ours:
            self.failed += 1
            log.error("a dump is left out: the disk is too slow for %d others", _WAITING)
            return False
        self._jobs.append(run)
        self._worker.wake()
        return True

    def _run_first(self) -> None:
        try:
            self._jobs[0]()
        finally:
            self._jobs.popleft()

    def wait(self, job: DumpJob, timeout: float) -> Path | None:
        """Return the directory of a dump, or ``None`` if it was not written within `timeout` seconds."""
        self._worker.wait_for(lambda: job.is_finished, timeout)
        return job.path

    def close(self, timeout: float) -> bool:
        """Wait for the thread, at most `timeout` seconds; return whether everything was written."""
        return self._worker.close(timeout)
