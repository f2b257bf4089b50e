"""The memory that the recorder may use: a budget of the user's, and what the system has left."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MemoryBudget", "available_bytes"]

_ROOT = Path("/")


class MemoryBudget:
    """Divides a number of bytes among the parts of the recorder, and asks the system before it is used.

    Parameters
    ----------
    total : int
        The largest number of bytes.

    Attributes
    ----------
    ring : int
        For the rows of the last steps.  A dump that waits for the disk holds a copy of them; there are at most four.
    steps : int
        For the batches of the steps that can run again.
    state : int
        For one copy of the state of the training; there are at most three at a time.
    histograms : int
        For the histograms that are counted in one step of a burst.
    burst : int
        For what is kept of a burst.

    Examples
    --------
    >>> MemoryBudget(1 << 30).ring
    33554432
    """

    def __init__(self, total: int) -> None:
        self.ring = self.burst = total // 32
        self.histograms, self.steps, self.state = total // 16, total // 10, total // 6

    @staticmethod
    def has_room(size: int) -> bool:
        """Return whether `size` bytes are at most half of what the system has left."""
        return size <= available_bytes() // 2


def available_bytes(root: Path = _ROOT) -> int:
    """Return how much memory this process can get before the system ends it: that of the machine, or less in a container.

    Parameters
    ----------
    root : Path
        The root of the file system.

    Returns
    -------
    int
        2⁶² where the system does not say it.
    """
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for directory, limit, usage, cache in _groups(root):
        with contextlib.suppress(OSError, ValueError, IndexError):  # without a limit the file says "max"
            bound = int((directory / limit).read_text())
            used = int((directory / usage).read_text())
            counters = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            found.append(max(bound - used + int(counters.get(cache, 0)), 0))
    return min(found)


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield the control groups of this process and those around them, with the names of their files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in name.split("/") if part not in ("", "..")]
        for length in range(len(parts), -1, -1):  # in a container the name may be that outside of it
            yield base.joinpath(*parts[:length]), *files
