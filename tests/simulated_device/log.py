"""A log of what happens on the simulated device."""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Entry", "Log", "recorded", "write"]


class Entry(NamedTuple):
    """Something that happened.

    Parameters
    ----------
    kind : str
        ``"launch"`` (an operator that computes), ``"sync"`` (the host waits), ``"d2h"`` or ``"h2d"`` (a copy from or to the device),
        ``"query"`` (the host asks an event).
    name : str
        The operator, or why the host waits.
    read, written : int
        Bytes.
    launches : int
        The number of kernels that CUDA launches for the operator.
    where : str
        For ``"sync"``, the innermost function of ikkuna that waits; empty if the code of the user waits.
    beside : bool
        Whether it happened in the thread that waits for devices, beside training.
    """

    kind: str
    name: str
    read: int = 0
    written: int = 0
    launches: int = 0
    where: str = ""
    beside: bool = False


class Log(list[Entry]):
    """The entries of a period."""

    @property
    def waits(self) -> list[Entry]:
        """Where training has waited for the device."""
        return [entry for entry in self if entry.kind == "sync" and not entry.beside]

    def count(self, kind: str) -> int:  # type: ignore[override]
        """Return the number of entries of a kind."""
        return sum(entry.kind == kind for entry in self)

    @property
    def launches(self) -> int:
        """The number of kernels launched."""
        return sum(entry.launches for entry in self)

    @property
    def read(self) -> int:
        """Bytes read by kernels."""
        return sum(entry.read for entry in self if entry.kind == "launch")

    @property
    def written(self) -> int:
        """Bytes written by kernels."""
        return sum(entry.written for entry in self if entry.kind == "launch")


_open: list[Log] = []


@contextmanager
def recorded() -> Iterator[Log]:
    """Return a list to which everything that happens inside is appended."""
    _open.append(log := Log())
    try:
        yield log
    finally:
        _open[:] = [other for other in _open if other is not log]


def write(kind: str, name: str, read: int = 0, written: int = 0, launches: int = 0) -> None:
    """Append an entry to the open logs."""
    if not _open:
        return
    beside = threading.current_thread().name == "ikkuna device"
    entry = Entry(kind, name, read, written, launches, _caller() if kind == "sync" else "", beside)
    for log in _open:
        log.append(entry)


def _caller() -> str:
    frames = (f for f in reversed(traceback.extract_stack()) if "/ikkuna" in f.filename)
    return next((f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in frames), "")
