"""The backend that keeps nothing."""

from ikkuna.visualization.backend import Backend, Series

__all__ = ["NullBackend"]


class NullBackend(Backend):
    """Take every value and forget it: for subscribers that only publish."""

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Do nothing."""
