"""A clock that shows the time of day and never runs backwards."""

import time

__all__ = ["WallClock"]


class WallClock:
    """Seconds since 1970: the time at which it was made plus what a monotonic clock has counted since.

    An adjustment of the system's clock would otherwise draw a curve that goes back in time.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return self._offset + time.monotonic()
