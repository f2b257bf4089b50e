"""A matrix of numbers with named rows and columns, shown as a picture."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Matrix"]


@dataclass(frozen=True, eq=False)
class Matrix:
    """Numbers with a name for each row and each column.

    Parameters
    ----------
    rows, columns : tuple of str
        The names.
    values : ndarray
        (row, column), float64; may contain NaN and infinities.
    limits : (float, float), optional
        Ends of the colour scale; by default the least and the greatest finite value.

    Examples
    --------
    >>> Matrix(("a", "b"), ("x",), np.array([[1.0], [0.5]])).values.shape
    (2, 1)
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: NDArray[np.float64]
    limits: tuple[float, float] | None = None
