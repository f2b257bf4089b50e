"""Runs the C++ compiler."""

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from ikkuna.native.private_files import read_private_file, safe_directory

__all__ = ["LIBRARY_BYTES", "Compiler", "CompilerError"]

LIBRARY_BYTES = 1 << 26
"""The largest library that is accepted."""

_FLAGS = (*("-std=c++17", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"), "-shared", "-fPIC")
_TUNINGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
_MESSAGE_BYTES = 1 << 16


class CompilerError(RuntimeError):
    """The compiler failed, and would probably fail again."""


class Compiler:
    """The C++ compiler: that of ``$CXX``, or the first that is installed.

    ``$CXX`` may be a command with arguments, such as ``ccache g++``.

    Parameters
    ----------
    seconds : float
        How long it may run.

    Attributes
    ----------
    command : list of str
        The program and its arguments.

    Raises
    ------
    RuntimeError
        If there is none.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self.command = _find()
        self._seconds = seconds

    def identity(self) -> bytes:
        """Return bytes that change with the command, its programs, its flags and the C library; the compiler does not run."""
        parts = [*self.command, *_FLAGS, *map(str, _TUNINGS), "".join(platform.libc_ver())]
        for word in self.command:
            if (found := shutil.which(word)) is not None:
                status = os.stat(found)
                parts += [os.path.realpath(found), str(status.st_size), str(status.st_mtime_ns)]
        return "\0".join(parts).encode(errors="surrogateescape")

    def build(self, source: bytes, parent: Path) -> bytes:
        """Compile for this processor, or if the compiler does not support that, for any; return the library.

        Parameters
        ----------
        source : bytes
            The program.
        parent : Path
            Where the compiler works, in a new directory that only this user can change.

        Raises
        ------
        CompilerError
            If the compiler fails, or takes longer than its time.
        OSError
            If there is no such place, or the compiler cannot be run.
        """
        deadline = time.monotonic() + self._seconds
        with tempfile.TemporaryDirectory(
            prefix="ikkuna-", dir=safe_directory(parent), ignore_cleanup_errors=True
        ) as directory:
            read, made = Path(directory) / "kernels.cpp", Path(directory) / "kernels.so"
            read.write_bytes(source)
            for tuning in _TUNINGS:
                arguments = [*self.command, *_FLAGS, *tuning, "-o", str(made), str(read)]
                status, message = _run(arguments, deadline, Path(directory))
                if status == 0:
                    return self._result(made)
        raise CompilerError(f"{self} failed: {message}")

    def _result(self, made: Path) -> bytes:
        try:
            return read_private_file(made, LIBRARY_BYTES)
        except OSError as error:
            raise CompilerError(f"{self} made no library: {error.strerror or error}") from error

    def __str__(self) -> str:
        return shlex.join(self.command)


def _find() -> list[str]:
    wanted = os.environ.get("CXX", "").strip()
    if not wanted:
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        if found is None:
            raise RuntimeError("no C++ compiler was found")
        return [found]
    if shutil.which(wanted):  # a path may contain blanks
        return [wanted]
    with contextlib.suppress(ValueError):  # an unbalanced quote
        command = shlex.split(wanted)
        if command and shutil.which(command[0]):
            return command
    raise RuntimeError(f"no C++ compiler was found as {wanted!r}")


def _run(arguments: list[str], deadline: float, directory: Path) -> tuple[int, str]:
    """Return the exit status of a command, and the first line of its output."""
    # output goes to a file, since a process that the compiler started can keep a pipe open;
    # its own temporary files are in the directory too, because others may be able to write to $TMPDIR
    with tempfile.TemporaryFile(dir=directory) as output:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(directory)},
        )
        try:
            status = process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise CompilerError(f"{shlex.join(arguments[:1])} did not end in time") from None
        finally:
            _end(process)
        return status, _first_line(output)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the compiler and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def _first_line(output: IO[bytes]) -> str:
    """Return the first line that is not empty, without characters that would change a terminal."""
    output.seek(0)
    text = output.read(_MESSAGE_BYTES).decode(errors="replace").strip()
    line = text.splitlines()[0] if text else "it said nothing"
    return "".join(c if c.isprintable() else "?" for c in line)[:200]
