"""The library's C++ sources as shared libraries: compiled when the package is built, or when they are first needed.

What a process has compiled is kept for the next one, and so is a failure of the compiler.  One process compiles while others wait for it.
"""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from ikkuna.printable import printable
from ikkuna.support.failures import log
from ikkuna.support.files import private_directory, read_private_file, safe_directory, write_private_file

LIBRARY_BYTES = 1 << 26
"""The largest library that is accepted."""

_PACKAGE = Path(__file__).parents[1]

SOURCES = {
    "kernels": tuple(
        _PACKAGE / "numerics/statistics/native" / name for name in ("kernels.cpp", "histograms.cpp", "tensors.cpp")
    ),
    "events": (_PACKAGE / "store/events.cpp",),
}
"""The files of each library that needs no header of torch."""

_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=off", "-shared", "-fPIC"),  # results do not depend on the processor
)
_MESSAGE_BYTES = 1 << 16


_INCLUDE = re.compile(rb'#include "([^"]+)"\n')
_PREFIX = "ikkuna-build-"
_OLD_SECONDS = 3600.0
_PASSING = re.compile("signal|killed|memory|space left|quota|temporarily", re.IGNORECASE)


class CompilerError(RuntimeError):
    """The compiler failed."""

    @property
    def will_recur(self) -> bool:
        """Whether it would probably fail again: its message names no lack of memory or disk space, and no signal."""
        return not _PASSING.search(str(self))


class Compiler:
    """The C++ compiler: that of ``$CXX``, or the first that is installed.

    ``$CXX`` may be a command with arguments, such as ``ccache g++``.

    Parameters
    ----------
    seconds : float
        How long it may run.
    *flags : str
        Its options; by default those for a library without dependencies.

    Attributes
    ----------
    command : list of str
        The program and its arguments.
    seconds : float
        How long it may run.

    Raises
    ------
    RuntimeError
        If there is none.
    """

    def __init__(self, seconds: float = 60.0, *flags: str) -> None:
        self.command = _find()
        self.seconds = seconds
        self._flags = flags or _FLAGS

    def identity(self) -> bytes:
        """Return bytes that change with the command, its programs, its flags, the kind of processor and the C library.

        The compiler does not run.
        """
        parts = [*self.command, *self._flags, platform.machine(), "".join(platform.libc_ver())]
        for word in self.command:
            if (found := shutil.which(word)) is not None:
                status = os.stat(found)
                parts += [os.path.realpath(found), str(status.st_size), str(status.st_mtime_ns)]
        return "\0".join(parts).encode(errors="surrogateescape")

    def build(self, source: bytes, parent: Path, kept: Sequence[int] = ()) -> bytes:
        """Compile for any processor of this kind; return the library.

        Parameters
        ----------
        source : bytes
            The program.
        parent : Path
            Where the compiler works, in a new directory that only this user can change.
        kept : sequence of int
            Descriptors that stay open while the compiler runs, which may be longer than this process does.

        Raises
        ------
        CompilerError
            If the compiler fails, or takes longer than its time.
        OSError
            If there is no such place, or the compiler cannot be run.
        """
        deadline = time.monotonic() + self.seconds
        parent = safe_directory(parent)
        _remove_old(parent)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as directory:
            read, made = Path(directory) / "kernels.cpp", Path(directory) / "kernels.so"
            read.write_bytes(source)
            status, message = _run(
                [*self.command, *self._flags, "-o", str(made), str(read)], deadline, Path(directory), kept
            )
            if status == 0:
                return self._result(made)
        raise CompilerError(f"{self} failed: {message if status >= 0 else f'ended by signal {-status}'}")

    def _result(self, made: Path) -> bytes:
        try:
            return read_private_file(made, LIBRARY_BYTES)
        except OSError as error:
            raise CompilerError(f"{self} made no library: {error.strerror or error}") from error

    def __str__(self) -> str:
        return shlex.join(self.command)


def _remove_old(parent: Path) -> None:
    """Remove the directories of builds that were killed, which are older than an hour."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _OLD_SECONDS:
                shutil.rmtree(directory)


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


def _run(arguments: list[str], deadline: float, directory: Path, kept: Sequence[int]) -> tuple[int, str]:
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
            pass_fds=kept,
            env={**os.environ, "TMPDIR": str(directory)},
        )
        end = partial(_end, process)
        atexit.register(end)  # this may be a thread that does not keep the interpreter alive
        try:
            status = process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise CompilerError(f"{shlex.join(arguments[:1])} did not end in time") from None
        finally:
            atexit.unregister(end)
            end()
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
    return printable(line)[:200]


_DIGEST = hashlib.sha256().digest_size
_REASON_BYTES = 1000
_FAILURE_SECONDS = 3600.0
_LOOK_SECONDS = 0.1


class LibraryCache:
    """A directory of libraries by name.

    Each file begins with the checksum of its name and of the library that follows, so a damaged file, or that of another
    name, is not used; the next :meth:`store` replaces it.
    If other users can change the directory or its parents, it is not used, and nothing is stored.

    Parameters
    ----------
    directory : Path, optional
        Created if it does not exist.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory: Path | None = None
        if directory is not None:
            try:
                self.directory = private_directory(directory)
            except OSError as error:
                log.info(
                    "the native kernels are compiled for each process, because their cache cannot be used: %s", error
                )

    @contextlib.contextmanager
    def locked(self, name: str, seconds: float) -> Iterator[Sequence[int]]:
        """Wait until no other process makes the library of this name, but not longer than some seconds.

        A compiler takes a processor and a gigabyte, and many processes may begin at once.

        Yields
        ------
        list of int
            The descriptor of the lock, if there is one; a compiler that has it too holds the lock when this process is killed.
        """
        held, deadline = list[int](), time.monotonic() + seconds
        with contextlib.suppress(OSError):  # a disk that is full or read-only, or a file system without locks
            if self.directory is not None:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                held.append(os.open(self.directory / f"{name}.lock", flags, 0o600))
                while not _has_locked(held[0]) and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS)
        try:
            yield held
        finally:
            for descriptor in held:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork may have the descriptor too
                os.close(descriptor)

    def load(self, name: str) -> bytes | None:
        """Return the library of this name; ``None`` if there is none that is whole and private."""
        content = self._read(f"{name}.library", LIBRARY_BYTES + _DIGEST)
        if content is None:
            return None
        digest, library = content[:_DIGEST], content[_DIGEST:]
        return library if library and digest == _digest(name, library) else None

    def store(self, name: str, library: bytes) -> None:
        """Store a library, unless that fails."""
        self._write(f"{name}.library", _digest(name, library) + library)

    def failure(self, name: str) -> str | None:
        """Return why the compiler failed to make this library, if that was within one hour."""
        content = self._read(f"{name}.failure", _REASON_BYTES)
        if content is None:
            return None
        when, _, reason = content.decode(errors="replace").partition(" ")
        try:
            is_recent = 0 <= time.time() - float(when) < _FAILURE_SECONDS
        except ValueError:
            return None
        return reason if is_recent else None

    def store_failure(self, name: str, reason: str) -> None:
        """Store why the compiler has failed, unless that fails."""
        self._write(f"{name}.failure", f"{int(time.time())} {reason}".encode(errors="replace")[:_REASON_BYTES])

    def _read(self, name: str, limit: int) -> bytes | None:
        if self.directory is not None:
            with contextlib.suppress(OSError):
                return read_private_file(self.directory / name, limit)
        return None

    def _write(self, name: str, content: bytes) -> None:
        if self.directory is not None:
            with contextlib.suppress(OSError):  # the disk is full or read-only, for example
                write_private_file(self.directory / name, content)


def _has_locked(descriptor: int) -> bool:
    """Lock a file; return ``False`` if another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _digest(name: str, library: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + library).digest()


_numbers = itertools.count(1)
_ELF_64 = b"\x7fELF\x02"
_HEADER = struct.Struct("=32xQQ6xHHHH2x")  # e_phoff, e_shoff, e_phentsize, e_phnum, e_shentsize, e_shnum
_SEGMENT = struct.Struct("=8xQ16xQ16x")  # p_offset, p_filesz


def load_from_memory(library: bytes) -> ctypes.CDLL:
    """Load exactly these bytes: no file is involved that could be replaced before, or truncated afterwards.

    Where the system has no files in memory, or refuses to run them, the bytes are written to a new directory that only this user
    can change.

    Raises
    ------
    OSError
        If this is not a library that the system can load.
    """
    if library[:5] == _ELF_64 and not _is_whole(library):
        raise OSError("the native library is truncated")
    try:
        descriptor = os.memfd_create("ikkuna", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(library)
            file.flush()
            # the dynamic linker returns an earlier library of the same name, and the numbers of descriptors are used again
            return ctypes.CDLL(f"/proc/self/fd/{'./' * next(_numbers)}{descriptor}")
    except (AttributeError, OSError):
        return _load_from_directory(library)


def _is_whole(library: bytes) -> bool:
    """Return whether all segments and the table of sections, which is at the end, lie within an ELF file.

    Loading a truncated library ends the process with SIGBUS.
    """
    if len(library) < _HEADER.size:
        return False
    segments, sections, size, count, section_size, section_count = _HEADER.unpack_from(library)
    ends: list[int] = [sections + section_size * section_count, segments + size * count]
    if max(ends) <= len(library):
        ends += [sum(_SEGMENT.unpack_from(library, segments + size * i)) for i in range(count)]
    return max(ends) <= len(library)


def _load_from_directory(library: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="ikkuna-", dir=safe_directory(Path(tempfile.gettempdir()))) as directory:
        path = Path(directory) / "kernels.so"
        path.write_bytes(library)
        return ctypes.CDLL(str(path))  # a loaded library needs no file


Made = TypeVar("Made")


def typed_function(
    library: ctypes.CDLL, name: str, arguments: tuple[Any, ...], result: Any = None
) -> Callable[..., Any]:
    """Return a function of a library with the types of its arguments and of its result; raise `RuntimeError` if it is missing."""
    try:
        function: Any = getattr(library, name)
    except AttributeError as error:
        raise RuntimeError(f"the native library has no function {name}") from error
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


def stored_library(source: bytes, make: Callable[[ctypes.CDLL], Made], compiler: Compiler) -> Made | None:
    """Return `make` of the library if an earlier process has compiled it; see :func:`build_library`.

    Raises
    ------
    CompilerError
        If the compiler has failed within one hour.
    """
    name, cached = _name(compiler, source), LibraryCache(_cache_directory())
    if (stored := cached.load(name)) is not None:
        with contextlib.suppress(OSError, RuntimeError):  # compiled for another system, for example
            return make(load_from_memory(stored))
    if (reason := cached.failure(name)) is not None:
        raise CompilerError(f"{reason} (delete '{cached.directory}' to try again)")
    return None


def compile_into(package: Path) -> None:
    """Compile :data:`SOURCES` into a copy of this package that is to be installed where there may be no compiler.

    Raises
    ------
    RuntimeError
        If there is no compiler, or if it fails.
    OSError
        If there is no place for temporary files, or for the libraries.
    """
    shutil.rmtree(package / "libraries", ignore_errors=True)  # an earlier build's, of other sources
    (package / "libraries").mkdir()
    for files in SOURCES.values():
        source = joined_source(*files)
        _shipped(source, package).write_bytes(Compiler().build(source, Path(tempfile.gettempdir())))


def _shipped(source: bytes, package: Path = _PACKAGE) -> Path:
    """Return where a package has the library of a source."""
    return package / "libraries" / f"{hashlib.sha256(source).hexdigest()[:20]}.so"


def build_library(source: bytes, make: Callable[[ctypes.CDLL], Made], compiler: Compiler | None = None) -> Made:
    """Return `make` of the library that the package has for a C++ source, or that is compiled from it.

    A compiled library is stored in ``$XDG_CACHE_HOME/ikkuna`` or ``~/.cache/ikkuna``, under a name that depends on source and compiler.
    It is used only if no other user could have written it and its checksum is right; otherwise it is compiled again.
    If the directory cannot be used, it is compiled for this process alone.
    A compiler that fails, or that runs for more than 60 seconds, is tried again after an hour.  Of several processes one compiles.

    Parameters
    ----------
    source : bytes
        The program.
    make : callable
        Checks a loaded library and returns an object for it; it raises `RuntimeError` if the library is wrong.
    compiler : Compiler, optional
        The compiler, with its options; the package has no library for it.

    Raises
    ------
    RuntimeError
        If there is no compiler, or if it fails.
    OSError
        If there is no place for temporary files.
    """
    if compiler is None:
        with contextlib.suppress(OSError, RuntimeError):  # it is not there, damaged, or for another system
            return make(load_from_memory(_shipped(source).read_bytes()))
        compiler = Compiler()
    name, cached = _name(compiler, source), LibraryCache(_cache_directory())
    with cached.locked(name, compiler.seconds) as lock:
        if (stored := stored_library(source, make, compiler)) is not None:
            return stored
        try:
            library = _build(compiler, source, cached.directory, lock)
            made = make(_load(library))
        except RuntimeError as error:
            if not isinstance(error, CompilerError) or error.will_recur:
                cached.store_failure(name, str(error))
            raise
        cached.store(name, library)
    return made


def joined_source(*files: Path) -> bytes:
    """Return C++ files in one piece, each file that one of them includes by ``#include "…"`` in place of that line."""

    def included(file: Path) -> bytes:
        return _INCLUDE.sub(lambda line: included(file.parent / line[1].decode()), file.read_bytes())

    return b"\n".join(map(included, files))


def _load(library: bytes) -> ctypes.CDLL:
    try:
        return load_from_memory(library)
    except OSError as error:
        raise CompilerError(f"the compiled library cannot be loaded: {error}") from error


def _build(compiler: Compiler, source: bytes, directory: Path | None, lock: Sequence[int]) -> bytes:
    try:
        return compiler.build(source, Path(tempfile.gettempdir()), lock)
    except OSError:  # there is no place for temporary files, or others can change it
        if directory is None:
            raise
        return compiler.build(source, directory, lock)


def _cache_directory() -> Path | None:
    """Return the directory of the cache; ``None`` if this user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with contextlib.suppress(RuntimeError):
        return (base if base.is_absolute() else Path.home() / ".cache") / "ikkuna"
    return None


def _name(compiler: Compiler, source: bytes) -> str:
    """Return a name for source and compiler."""
    parts = source, compiler.identity()
    return f"kernels-{hashlib.sha256(b'|'.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:20]}"
