"""Close what is still open when the process ends."""

import atexit
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closing(Protocol):
    def close(self) -> None: ...


def close_at_exit(thing: _Closing) -> None:
    """Call ``thing.close()`` at the end of the process if `thing` is still there; hold it weakly until then."""
    reference = weakref.ref(thing)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    weakref.finalize(thing, atexit.unregister, atexit.register(close)).atexit = False
