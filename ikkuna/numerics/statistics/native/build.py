"""Compiles the kernels, or finds them in the cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ikkuna.logger import log
from ikkuna.numerics.statistics.native.library import Library

__all__ = ["library"]

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (*("-std=c++17", "-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"), "-shared", "-fPIC")
_TUNINGS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())
_SECONDS = 60.0


@cache
def library() -> Library | None:
    """Return the native kernels; ``None``, after one line in the log, if there is no compiler or the library cannot be loaded.

    The library is stored in ``$XDG_CACHE_HOME/ikkuna`` or ``~/.cache/ikkuna``, under a name that depends on source, compiler and processor.
    If this directory is not writable, the library is built in a temporary directory for this process alone.
    """
    try:
        return _load_or_build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()
        log.info("statistics are measured with numpy, which costs more: %s", reason[0] if reason else error)
        return None


def _load_or_build() -> Library:
    compiler = _compiler()
    name = f"kernels-{_fingerprint(compiler)}.so"
    for directory in (_cache_directory(), None):
        try:
            if directory is None:
                with tempfile.TemporaryDirectory(prefix="ikkuna-") as own:  # a loaded library needs no file
                    return Library(_build(compiler, Path(own) / name))
            return Library(_found_or_built(compiler, directory, name))
        except OSError as error:
            failure = error  # the directory is not writable, or mounted without execution
    raise failure


def _found_or_built(compiler: str, directory: Path, name: str) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    path = directory / name
    return path if path.exists() else _build(compiler, path)


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikkuna"


def _compiler() -> str:
    asked = os.environ.get("CXX")
    found = next(filter(None, map(shutil.which, (asked,) if asked else ("c++", "g++", "clang++"))), None)
    if found is None:
        raise RuntimeError(f"no C++ compiler was found{f' as {asked!r}' if asked else ''}")
    return found


def _fingerprint(compiler: str) -> str:
    """Return a name for source, compiler and processor: machines with different processors may share a home directory."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
    return hashlib.sha256(b"\0".join((_SOURCE.read_bytes(), version, _processor()))).hexdigest()[:20]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return f"{platform.node()} {platform.machine()} {platform.processor()}".encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))


def _build(compiler: str, path: Path) -> Path:
    """Compile for this processor, or if the compiler does not support that, for any; the file appears complete or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        for tuning in _TUNINGS:
            command = [compiler, *_FLAGS, *tuning, "-o", str(made), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
            if done.returncode == 0:
                os.replace(made, path)
                return path
    raise RuntimeError(f"{compiler} failed: {done.stderr.strip()}")
