"""Writes dumps: directories that appear complete or not at all, in a thread."""

import contextlib
import io
import json
import os
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.support.failures import log
from ikkuna.support.files import atomic_path
from ikkuna.support.threads import BackgroundThread

__all__ = ["FORMAT", "INDEX", "DumpContent", "DumpJob", "DumpWriter", "add_arrays", "file_bytes", "write_dump"]

FORMAT = 1
"""The version of the format, stored in ``dump.json``."""

INDEX = "dump.json"
"""The file that describes a dump, and lists its other files."""


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
        The ``.npz`` files.
    tensors : dict of str to object
        The ``.pt`` files: tensors, numbers and texts in lists and dicts.  They are left out, the first one first,
        if the dump would be larger than `max_bytes`.
    max_bytes : int
        The largest size of all files.
    """

    name: str
    facts: dict[str, Any]
    arrays: dict[str, dict[str, NDArray[Any]]]
    tensors: dict[str, Any] = field(default_factory=dict)
    max_bytes: int = 1 << 28


def write_dump(parent: Path, content: DumpContent) -> Path:
    """Write a dump as a new directory below `parent`, and return it.

    The files are written and synchronised in a hidden directory, which then gets its name, so that a reader never sees half a dump,
    and a dump that exists survives ``kill -9`` and a loss of power.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left then.
    """
    parent.mkdir(parents=True, exist_ok=True)
    partial = parent / f".{content.name}.{os.urandom(8).hex()}"
    partial.mkdir()
    try:
        _write_files(partial, content)
        target = _rename_unused(partial, parent, content.name)
        _synchronise(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_files(directory: Path, content: DumpContent) -> None:
    files: dict[str, Any] = {}
    left_out: dict[str, str] = dict(content.facts.get("left_out", {}))
    size = 0
    for name, arrays in content.arrays.items():
        size += _write(directory / name, _npz(arrays), files)
    for name, value in reversed(content.tensors.items()):
        expected = _size_of(value)
        if size + expected > content.max_bytes:
            left_out[name] = f"it has {expected} bytes, and a dump has at most {content.max_bytes}"
            continue
        try:
            size += _write(directory / name, _torch_file(value), files)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # an object that cannot be stored
            left_out[name] = f"{type(error).__name__}: {error}"
    facts = content.facts | {"format": FORMAT, "files": files, "left_out": left_out}
    _write(directory / INDEX, json.dumps(_finite(facts), indent=1).encode(), {})
    _synchronise(directory)


def _write(path: Path, data: bytes, files: dict[str, Any]) -> int:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    files[path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    return len(data)


def _rename_unused(partial: Path, parent: Path, name: str) -> Path:
    for number in count(1):
        target = parent / (name if number == 1 else f"{name}_{number}")
        if not target.exists():
            with contextlib.suppress(FileExistsError):
                partial.rename(target)
                return target
    raise AssertionError


def add_arrays(directory: Path, name: str, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Add a ``.npz`` file, and further facts, to a dump; each file is replaced in one step.

    Raises
    ------
    OSError
        If it cannot be written; the dump is as before then.
    """
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    files: dict[str, Any] = {}
    with atomic_path(directory / name) as partial:
        _write(partial, _npz(arrays), files)
    index["files"][name] = files.popitem()[1]
    with atomic_path(directory / INDEX) as partial:
        _write(partial, json.dumps(_finite(index | dict(facts)), indent=1).encode(), {})
    _synchronise(directory)


def _synchronise(directory: Path) -> None:
    """Write the names in a directory to the disk, where the system can do that."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _npz(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{key.replace("/", "|"): array for key, array in arrays.items()})
    return buffer.getvalue()


def _torch_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(_on_host(value), buffer)
    data = buffer.getvalue()
    torch.load(io.BytesIO(data), weights_only=True)  # raises if it contains more than tensors and plain values
    return data


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(item) for item in value)
    return value


def _size_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_size_of, items))


def _finite(value: Any) -> Any:
    """Return a value with NaN and infinities as texts, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not np.isfinite(value) else value


def file_bytes(directory: Path, name: str) -> bytes:
    """Return the content of one file of a dump."""
    return (directory / name).read_bytes()


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
