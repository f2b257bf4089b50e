"""A table of numbers that is shown as a picture: how each of some modules stands to each of others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Matrix"]


@dataclass(frozen=True, eq=False)
class Matrix:
    """Numbers with a name for each row and each column.

    Parameters
    ----------
    rows, columns : names
    values : ``(row, column)``, float64; NaN and infinities are values
    limits : the ends of the scale they are shown on; by default their own extrema

    Examples
    --------
    >>> Matrix(("a", "b"), ("x",), np.array([[1.0], [0.5]])).values.shape
    (2, 1)
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    limits: tuple[float, float] | None = None
