"""Errors and stalls of the calls that read and write files, for the paths below one directory of another process.

A library in C takes the place of the functions of the C library; it is compiled by the compiler that compiles the kernels.

>>> rules = [Fault("write", "short", first=3, last=3), Fault("fsync", errno.EIO, probability=0.1)]
>>> [str(rule) for rule in rules]
['write 3 3 1 short 0 ;', 'fsync 1 1000000000 0.1 fail 5 ;']
"""

import errno
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fault", "Shim", "build_shim"]

_SOURCE = Path(__file__).with_name("shim.c")
_ALWAYS = 10**9


@dataclass(frozen=True)
class Fault:
    """Fate of calls of an operation.

    Parameters
    ----------
    operation : str
        ``"write"``, ``"fsync"`` (also fdatasync), ``"open"``, ``"mkdir"``, ``"ftruncate"``, ``"rename"``, ``"fstat"`` or ``"unlink"``.
    action : int, float or str
        A number of an error (`errno.EIO`), which the call reports, a number of seconds (float) that it takes longer, or:
        ``"short"``: half of the bytes are written; ``"torn"``: then, ``EIO`` is reported;
        ``"lose"``: fsync reports ``EIO``, and bytes that were not synchronised become zeros, as Linux may discard them.
    first, last : int
        The calls it applies to; operations are counted from 1.
    probability : float
        With which it applies to each of them.
    """

    operation: str
    action: int | float | str
    first: int = 1
    last: int = _ALWAYS
    probability: float = 1.0

    def __str__(self) -> str:
        if isinstance(self.action, str):
            action, number = self.action, 0 if self.action == "short" else errno.EIO
        else:
            action, number = ("stall" if isinstance(self.action, float) else "fail"), self.action
        return f"{self.operation} {self.first} {self.last} {self.probability:g} {action} {number} ;"


class Shim:
    """The compiled library.

    Parameters
    ----------
    path : Path
        The library.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def environment(
        self, below: Path, faults: list[Fault], seed: int = 0, journal: Path | None = None
    ) -> dict[str, str]:
        """Return the environment variables of a process in which the `faults` happen to paths below a directory.

        Each of them is appended to the file `journal` as a line "seconds operation action", in the time of `time.monotonic`.
        """
        variables = {
            "LD_PRELOAD": str(self.path),
            "FILE_FAULTS_BELOW": str(below.resolve()),
            "FILE_FAULTS": " ".join(map(str, faults)),
            "FILE_FAULTS_SEED": str(seed),
        }
        if journal is not None:
            variables["FILE_FAULTS_JOURNAL"] = str(journal)
        return variables


def build_shim(directory: Path) -> Shim:
    """Compile the library.

    Raises
    ------
    RuntimeError
        If that is impossible on this system, with the reason.
    """
    # it imports torch, which processes under the shim may lack
    from ikkuna.support.native import Compiler

    if not sys.platform.startswith("linux"):
        raise RuntimeError("only Linux has LD_PRELOAD")
    made = directory / "file_faults.so"
    command = [
        *Compiler().command,
        "-x",
        "c",
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        str(made),
        str(_SOURCE),
        "-ldl",
        "-lpthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr[:500]}")
    return Shim(made)
