"""Compiles the kernels, or finds them in the cache."""

import contextlib
import hashlib
import os
import platform
import tempfile
from functools import cache
from pathlib import Path

from ikkuna.logger import log
from ikkuna.numerics.statistics.native.cache import LibraryCache
from ikkuna.numerics.statistics.native.compiler import Compiler, CompilerError
from ikkuna.numerics.statistics.native.library import Library
from ikkuna.numerics.statistics.native.loading import load_from_memory

__all__ = ["library"]

_SOURCE = Path(__file__).with_name("kernels.cpp")


@cache
def library() -> Library | None:
    """Return the native kernels; ``None``, after one line in the log, if there is no compiler or the library cannot be loaded.

    The library is stored in ``$XDG_CACHE_HOME/ikkuna`` or ``~/.cache/ikkuna``, under a name that depends on source, compiler and
    processor.  It is used only if no other user could have written it and its checksum is right; otherwise it is compiled again.
    If the directory cannot be used, it is compiled for this process alone.
    A compiler that fails, or that runs for more than 60 seconds, is tried again after an hour.
    """
    try:
        return _load_or_build()
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        log.info("statistics are measured with numpy, which costs more: %s", reason[0] if reason else error)
        return None


def _load_or_build() -> Library:
    compiler, source = Compiler(), _SOURCE.read_bytes()
    name, cached = _name(compiler, source), LibraryCache(_cache_directory())
    if (stored := cached.load(name)) is not None:
        with contextlib.suppress(OSError, RuntimeError):  # compiled for another system, for example
            return Library(load_from_memory(stored))
    if (reason := cached.failure(name)) is not None:
        raise CompilerError(f"{reason} (delete '{cached.directory}' to try again)")
    try:
        made = _build(compiler, source, cached.directory)
        found = _load(made)
    except RuntimeError as error:
        cached.store_failure(name, str(error))
        raise
    cached.store(name, made)
    return found


def _load(made: bytes) -> Library:
    try:
        return Library(load_from_memory(made))
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
