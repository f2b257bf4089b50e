"""Compiles the kernels, or finds them in the cache."""

from functools import cache
from pathlib import Path

from ikkuna.logger import log
from ikkuna.native import build_library
from ikkuna.numerics.statistics.native.library import Library

__all__ = ["library", "source"]

_SOURCES = ("kernels.cpp", "tensors.cpp", "hooks.cpp")


def source() -> bytes:
    """Return the program."""
    return b"\n".join(Path(__file__).with_name(name).read_bytes() for name in _SOURCES)


@cache
def library() -> Library | None:
    """Return the native kernels; ``None``, after one line in the log, if there is no compiler or the library cannot be loaded.

    See :func:`ikkuna.native.build_library`.
    """
    try:
        return build_library(source(), Library)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        log.warning("statistics are measured with numpy, which costs more: %s", reason[0] if reason else error)
        return None
