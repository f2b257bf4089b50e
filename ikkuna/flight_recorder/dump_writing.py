"""Writes dumps: directories that appear complete or not at all, in a thread."""

import contextlib
import io
import json
import logging
import os
import shutil
import textwrap
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.flight_recorder.capture import size_of
from ikkuna.flight_recorder.checks import PLAIN
from ikkuna.printable import finite
from ikkuna.support.arrays import write_arrays
from ikkuna.support.console import announce
from ikkuna.support.failures import error_text, log, suppressed
from ikkuna.support.files import atomic_path, synchronise_directory
from ikkuna.support.threads import Worker

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none
    fcntl = import_module("fcntl")

FORMAT = 1
"""The version of the format, stored in ``dump.json``."""

INDEX = "dump.json"
"""The file that describes a dump, and lists its other files."""

INDEX_BYTES = 1 << 22
"""The largest size of this file."""

_WAITING = 4
_CANNOT = "a dump cannot be written (training is not affected): %s: %s"  # said again after one that succeeds
_OLD = 86_400.0  # seconds after which an unfinished dump is removed where the file system has no locks


@dataclass
class DumpContent:
    """Contents of a dump.

    Parameters
    ----------
    name : str
        The name of its directory.
    facts : dict
        What ``dump.json`` says, as plain values.
    arrays : dict of str to dict of str to array
        The ``.npz`` files, the most important one first.
    tensors : dict of str to object
        The ``.pt`` files: tensors, numbers and texts in lists and dicts, the least important one first.
    max_bytes : int
        The largest size of all files.  Files that do not fit are left out, the least important ones first: tensors before arrays.
        A quarter is kept for a burst, which is added later.
    """

    name: str
    facts: dict[str, Any]
    arrays: dict[str, dict[str, NDArray[Any]]]
    tensors: dict[str, Any] = field(default_factory=dict)
    max_bytes: int = 1 << 28


def write_dump(parent: Path, content: DumpContent) -> Path:
    """Write a dump as a new directory below `parent`, and return it.

    The files are written and synchronised in a hidden directory, which then gets its name, so that a reader never sees half a dump,
    and a dump that exists survives ``kill -9`` and a loss of power.  Only the user can read it, because it holds training data.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left then.
    """
    parent.mkdir(parents=True, exist_ok=True)
    partial = parent / f".{content.name}.{os.urandom(8).hex()}"
    partial.mkdir(mode=0o700)
    with _locked(partial):
        try:
            _write_files(partial, content)
            target = _rename_unused(partial, parent, content.name)
            synchronise_directory(parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def remove_unfinished(log_dir: Path) -> None:
    """Remove what processes that were killed while they wrote a dump have left in the runs of a directory.

    A process that lives holds a lock on what it writes.  Where the file system has no locks, what is older than a day is removed.
    """
    for pattern in ("*/dumps", "dumps_rank*", "dumps"):
        for partial in [*log_dir.glob(f"{pattern}/.step_*"), *log_dir.glob(f"{pattern}/step_*/.*")]:
            with contextlib.suppress(OSError):
                _remove_if_unused(partial)


def _remove_if_unused(partial: Path) -> None:
    """Remove a hidden directory, or a hidden file in a dump, unless another process writes it."""
    is_old = time.time() - partial.stat().st_mtime > _OLD
    directory = partial if partial.is_dir() else partial.parent
    if not is_old and not any(directory.iterdir()):  # it is new, and may not be locked yet
        return
    with _locked(directory) as is_locked:
        if is_locked or is_old:
            shutil.rmtree(partial) if partial is directory else partial.unlink()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a directory during the ``with`` block; return whether that is done, which is not so where there are no locks.

    Raises
    ------
    BlockingIOError
        If another process holds the lock.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            raise
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


def _write_files(directory: Path, content: DumpContent) -> None:
    files: dict[str, Any] = {}
    left_out: dict[str, str] = dict(content.facts.get("left_out", {}))
    facts = content.facts | {"format": FORMAT, "files": files, "left_out": left_out}
    left = content.max_bytes - content.max_bytes // 4 - len(_index(facts, content.max_bytes)) - _RESERVED
    jobs: list[tuple[str, Any, Callable[[IO[bytes], Any], None]]] = [
        *((name, arrays, write_arrays) for name, arrays in content.arrays.items()),
        *((name, value, _write_tensors) for name, value in reversed(content.tensors.items())),
    ]
    for name, value, write in jobs:
        try:
            if size_of(value) > left and write is _write_tensors:
                raise _TooLargeError
            _write(directory / name, lambda file, write=write, value=value: write(file, value), files, left)  # type: ignore[misc]
            left -= files[name]["bytes"]
        except _TooLargeError:
            left_out[name] = f"a dump has at most {content.max_bytes} bytes"
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # an object that cannot be stored
            left_out[name] = error_text(error)
        if name in left_out:
            (directory / name).unlink(missing_ok=True)
    _write(directory / INDEX, lambda file: file.write(_index(facts, content.max_bytes)), {}, INDEX_BYTES)
    synchronise_directory(directory)


_RESERVED = 1024  # of dump.json, for the facts about the files


def _index(facts: dict[str, Any], max_bytes: int) -> bytes:
    """Return ``dump.json``; without the modules, and with shorter lists, if it would be too large."""
    limit = min(INDEX_BYTES, max(max_bytes // 4, 2048))
    shorter: dict[str, Any]
    for shorter in ({}, {"modules": []}, {"findings": [], "rules": []}):
        facts = facts | shorter
        data = json.dumps(finite(facts), separators=(",", ":")).encode()
        if len(data) <= limit:
            return data
    return json.dumps(finite(facts | {"reasons": [str(reason)[:200] for reason in facts["reasons"][:3]]})).encode()


class _TooLargeError(Exception):
    """A file of a dump is larger than allowed."""


class _Checked(io.RawIOBase):
    """Passes on what is written to a file, and computes its size and CRC-32; it cannot seek, so each byte passes once.

    An error is kept and not raised, because torch ends the process if a file raises while it writes.

    Parameters
    ----------
    file : IO
        The file.
    limit : int
        The largest size.
    """

    def __init__(self, file: IO[bytes], limit: int) -> None:
        self._file, self._limit = file, limit
        self.size = self.crc32 = 0
        self.error: Exception | None = None

    def writable(self) -> bool:
        """Return ``True``."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, unless an error has occurred."""
        count = memoryview(data).nbytes
        self.size += count
        if self.error is None:
            try:
                if self.size > self._limit:
                    raise _TooLargeError
                self.crc32 = zlib.crc32(data, self.crc32)
                self._file.write(data)
            except Exception as error:
                self.error = error
        return count


def _write(path: Path, write: Callable[[IO[bytes]], object], files: dict[str, Any], limit: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        checked = _Checked(file, limit)
        write(cast(IO[bytes], checked))
        if checked.error is not None:
            raise checked.error
        file.flush()
        os.fsync(file.fileno())
    files[path.name] = {"bytes": checked.size, "crc32": checked.crc32}


def _rename_unused(partial: Path, parent: Path, name: str) -> Path:
    for number in count(1):
        target = parent / (name if number == 1 else f"{name}_{number}")
        if not target.exists():
            with contextlib.suppress(FileExistsError):
                partial.rename(target)
                return target
    raise AssertionError


def add_arrays(
    directory: Path,
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    facts: Mapping[str, Any],
    max_bytes: int = 1 << 28,
) -> None:
    """Add a ``.npz`` file, and further facts, to a dump; each file is replaced in one step.

    Histograms are left out if the dump would be larger than `max_bytes`, and then the file.

    Raises
    ------
    OSError
        If it cannot be written; the dump is as before then.
    """
    with _locked(directory):
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        files: dict[str, Any] = {}
        limit = max_bytes - sum(file.stat().st_size for file in directory.iterdir()) - _RESERVED
        for given in (arrays, {**arrays, "histograms": np.zeros((0, 4), np.int64)}):
            with contextlib.suppress(_TooLargeError), atomic_path(directory / name) as partial:
                _write(partial, lambda file, given=given: write_arrays(file, given), files, limit)  # type: ignore[misc]
                break
            index["left_out"][name] = f"its histograms are too large; a dump has at most {max_bytes} bytes"
        if files:
            index["files"][name] = files.popitem()[1]
        else:
            index["left_out"][name] = f"a dump has at most {max_bytes} bytes"
        data = json.dumps(finite(index | dict(facts)), separators=(",", ":")).encode()
        with atomic_path(directory / INDEX) as partial:
            _write(partial, lambda file: file.write(data), {}, INDEX_BYTES)
        synchronise_directory(directory)


def _write_tensors(file: IO[bytes], value: Any) -> None:
    torch.save(_on_host(value), file)


def _on_host(value: Any) -> Any:
    """Return a nested value with its tensors on the host.

    Raises
    ------
    TypeError
        If it contains what a reader refuses.
    """
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item) for item in value)
    if not isinstance(value, PLAIN):
        raise TypeError(f"a {type(value).__name__} cannot be stored")
    return value


class DumpJob:
    """A dump on its way to the disk.

    Parameters
    ----------
    content : DumpContent
        What to write.
    directory : callable
        Returns the directory of the dumps; called in the thread, and may create it.
    verbosity : int
        0 to write no line about the dump.

    Attributes
    ----------
    reason : str
        Why it is written.
    path : Path or None
        The directory of the dump once it is written.
    is_finished : bool
        Whether it was written or given up.
    """

    def __init__(self, content: DumpContent, directory: Callable[[], Path], verbosity: int = 1) -> None:
        self._content: DumpContent | None = content
        self.verbosity = verbosity
        self.reason = textwrap.shorten("; ".join(map(str, content.facts.get("reasons", ()))), 90, placeholder=" …")
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

    def has_failed(self) -> bool:
        """Return whether the dump could not be written."""
        return self.is_finished and self.path is None


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
        self._said: set[str] = set()

    def write(self, job: DumpJob) -> None:
        """Write a dump soon."""

        def run() -> None:
            try:
                path = job.run()
                self.written.append(path)
                self._said.discard(_CANNOT)
                text = f"wrote the last steps to '{path}'; the reason: {job.reason}"
                announce(text, logging.WARNING, job.verbosity)
            except Exception as error:
                self._report(error)
            finally:
                job.finish()

        if not self._add(run):
            job.finish()

    def extend(
        self,
        job: DumpJob,
        name: str,
        arrays: Mapping[str, NDArray[Any]],
        facts: Mapping[str, Any],
        limit: Callable[[Path], int],
    ) -> None:
        """Add a file to a dump after it was written; `limit` returns the largest size of the dump, and is called in the thread."""

        def run() -> None:
            if job.path is not None:
                try:
                    add_arrays(job.path, name, arrays, facts, limit(job.path))
                except Exception as error:
                    self._report(error)

        self._add(run)

    def remove_unfinished(self, log_dir: Path) -> None:
        """Remove what killed processes have left, see :func:`remove_unfinished`."""

        def run() -> None:
            with suppressed(Exception):
                remove_unfinished(log_dir)

        if len(self._jobs) < _WAITING - 1:
            self._add(run)

    def _report(self, error: Exception) -> None:
        self.failed += 1
        self._say(_CANNOT, type(error).__name__, error)

    def _say(self, text: str, *values: object) -> None:
        """Log an error once; `failed` counts all."""
        if text not in self._said:
            self._said.add(text)
            log.error(f"{text}; health() counts further ones", *values)

    def _add(self, run: Callable[[], None]) -> bool:
        if len(self._jobs) >= _WAITING or self._worker.process != os.getpid():
            self.failed += 1
            self._say("a dump is left out: the disk is too slow for %d others", _WAITING)
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
