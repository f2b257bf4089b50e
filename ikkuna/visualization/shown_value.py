"""Checks histograms and matrices that are shown, so that no backend receives one that it cannot store."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.signal_handlers import raise_users_exception
from ikkuna.visualization.histogram import HistogramLike
from ikkuna.visualization.matrix import Matrix

__all__ = ["check_histogram", "checked_matrix"]

_NUMBERS = ("min", "max", "num", "sum", "sum_squares")


def checked_matrix(kind: str, matrix: Matrix) -> Matrix:
    """Return a copy of a matrix, because it is drawn later; `kind` is named in errors.

    Raises
    ------
    ConfigTypeError
        If it contains something else than real numbers and strings on the host.
    ConfigError
        If its parts do not fit together.

    Examples
    --------
    >>> checked_matrix("similarity", Matrix(("a",), ("x", "y"), np.zeros((2, 1))))
    Traceback (most recent call last):
        ...
    ikkuna.errors.ConfigError: 'similarity' shows a matrix with 1 names of rows and 2 of columns, but its shape is (2, 1)
    """
    rows, columns = _names(kind, matrix.rows), _names(kind, matrix.columns)
    values = _array(kind, "the values of a matrix", matrix.values)
    if values.shape != (len(rows), len(columns)):
        raise ConfigError(
            f"{kind!r} shows a matrix with {len(rows)} names of rows and {len(columns)} of columns, "
            f"but its shape is {values.shape}"
        )
    if matrix.limits is None:
        return Matrix(rows, columns, values)
    limits = _array(kind, "the limits of a matrix", matrix.limits)
    if limits.shape != (2,) or not np.isfinite(limits).all() or limits[0] > limits[1]:
        raise ConfigError(f"{kind!r} shows a matrix whose limits are not two finite numbers in order")
    return Matrix(rows, columns, values, (float(limits[0]), float(limits[1])))


def _names(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    try:
        found = tuple(names)
    except TypeError as error:
        raise ConfigTypeError(f"{kind!r} shows a matrix whose names are {type(names).__name__}, not strings") from error
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigTypeError(f"{kind!r} shows a matrix with a name of type {type(wrong[0]).__name__}, not a string")
    return found


def check_histogram(kind: str, histogram: HistogramLike) -> None:
    """Raise an error if a histogram cannot be stored; `kind` is named in it.

    Raises
    ------
    ConfigTypeError
        If it contains something else than real numbers on the host.
    ConfigError
        If it has not as many counts as limits.
    """
    for name in _NUMBERS:
        value = getattr(histogram, name)
        if type(value) is not float and _array(kind, f"{name} of a histogram", value).shape != ():
            raise ConfigTypeError(f"{kind!r} shows a histogram whose {name} is not a single number")
    limits = _array(kind, "bucket_limits of a histogram", histogram.bucket_limits)
    counts = _array(kind, "bucket_counts of a histogram", histogram.bucket_counts)
    if limits.ndim != 1 or limits.shape != counts.shape:
        raise ConfigError(
            f"{kind!r} shows a histogram with bucket_limits of shape {limits.shape} and bucket_counts of shape {counts.shape}"
        )


def _array(kind: str, what: str, values: Any) -> NDArray[np.float64]:
    """Return numbers as a new array; other values are no numbers."""
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"{found.dtype} is no type of real numbers")
        return np.array(found, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise_users_exception(error)
        raise ConfigTypeError(f"{kind!r} shows {what} that are not real numbers on the host: {error}") from error
