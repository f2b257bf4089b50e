"""What happens to an exporter that nobody has closed."""

import atexit
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(exporter: _Closable) -> None:
    """Close `exporter` when the interpreter ends, if it is still there; it is not kept alive."""
    reference = weakref.ref(exporter)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    weakref.finalize(exporter, atexit.unregister, atexit.register(close)).atexit = False
