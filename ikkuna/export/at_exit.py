"""Closes open objects at the end of the process."""

import atexit
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closeable(Protocol):
    def close(self) -> None: ...


def close_at_exit(thing: _Closeable) -> None:
    """Call ``thing.close()`` at the end of the process; only a weak reference to `thing` is kept until then."""
    reference = weakref.ref(thing)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    weakref.finalize(thing, atexit.unregister, atexit.register(close)).atexit = False
