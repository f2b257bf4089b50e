"""Compiles a source, or finds the library in the cache."""

import contextlib
import ctypes
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ikkuna.native.cache import LibraryCache
from ikkuna.native.compiler import Compiler, CompilerError
from ikkuna.native.loading import load_from_memory

__all__ = ["build_library"]

Made = TypeVar("Made")


def build_library(source: bytes, make: Callable[[ctypes.CDLL], Made]) -> Made:
    """Return `make` of the library that is compiled from a C++ source.

    The library is stored in ``$XDG_CACHE_HOME/ikkuna`` or ``~/.cache/ikkuna``, under a name that depends on source, compiler and
    processor.  It is used only if no other user could have written it and its checksum is right; otherwise it is compiled again.
    If the directory cannot be used, it is compiled for this process alone.
    A compiler that fails, or that runs for more than 60 seconds, is tried again after an hour.

    Parameters
    ----------
    source : bytes
        The program.
    make : callable
        Checks a loaded library and returns an object for it; it raises `RuntimeError` if the library is wrong.

    Raises
    ------
    RuntimeError
        If there is no compiler, or if it fails.
    OSError
        If there is no place for temporary files.
    """
    compiler = Compiler()
    name, cached = _name(compiler, source), LibraryCache(_cache_directory())
    if (stored := cached.load(name)) is not None:
        with contextlib.suppress(OSError, RuntimeError):  # compiled for another system, for example
            return make(load_from_memory(stored))
    if (reason := cached.failure(name)) is not None:
        raise CompilerError(f"{reason} (delete '{cached.directory}' to try again)")
    try:
        library = _build(compiler, source, cached.directory)
        made = make(_load(library))
    except RuntimeError as error:
        cached.store_failure(name, str(error))
        raise
    cached.store(name, library)
    return made


def _load(library: bytes) -> ctypes.CDLL:
    try:
        return load_from_memory(library)
    except OSError as error:
        raise CompilerError(f"the compiled library cannot be loaded: {error}") from error


def _build(compiler: Compiler, source: bytes, directory: Path | None) -> bytes:
    try:
        return compiler.build(source, Path(tempfile.gettempdir()))
    except OSError:  # there is no place for temporary files, or others can change it
        if directory is None:
            raise
        return compiler.build(source, directory)


def _cache_directory() -> Path | None:
    """Return the directory of the cache; ``None`` if this user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with contextlib.suppress(RuntimeError):
        return (base if base.is_absolute() else Path.home() / ".cache") / "ikkuna"
    return None


def _name(compiler: Compiler, source: bytes) -> str:
    """Return a name for source, compiler and processor: machines with different processors may share a home directory."""
    parts = source, compiler.identity(), _processor()
    return f"kernels-{hashlib.sha256(b'|'.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:20]}"


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.node()} {platform.machine()} {platform.processor()}".encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
