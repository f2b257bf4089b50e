"""What hooks belong to."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["HookOwner"]


class HookOwner:
    """Hears hooks for an observer: with its stopwatch, and errors are the observer's.

    Parameters
    ----------
    observer : who keeps the step
    """

    def __init__(self, observer: "Session") -> None:
        self._observer = observer
        self.stopwatch = observer.stopwatch

    def fault(self, where: str, error: Exception) -> None:
        """Take an error of our own."""
        self._observer.fault(where, error)
