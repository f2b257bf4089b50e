"""The backend that stores nothing."""

from ikkuna.visualization.backend import Backend, Series

__all__ = ["NullBackend"]


class NullBackend(Backend):
    """Discard every value; for subscribers that only publish."""

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Do nothing."""
