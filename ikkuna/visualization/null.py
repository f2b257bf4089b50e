"""The backend that stores nothing."""

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.backend import Backend
from ikkuna.visualization.series import Series, SeriesGroup

__all__ = ["NullBackend"]


class NullBackend(Backend):
    """Discard every value; for subscribers that only publish."""

    def add_scalar(self, series: Series, value: float, step: int) -> None:
        """Do nothing."""

    def add_group(self, group: SeriesGroup, values: NDArray[np.float64], step: int) -> None:
        """Do nothing."""
