r"""The band in which a series usually is, and which series leave it or differ from the others."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SCALE = 1.4826  # the standard deviation over the median absolute deviation, for normal data
_WINDOW, _LEAST = 20, 5  # values of a band
_WIDTH, _TOLERANCE = (
    8.0,
    0.05,
)  # of a band: in robust standard deviations, and the relative change that is never outside


class Band(NamedTuple):
    """Where the values of a series are, compared with those before them.

    Parameters
    ----------
    distance : ndarray (steps,)
        The distance from the running median in half-widths of the band; above 1 a value is outside.
        It is 0 for the first values, and infinite for values that are not finite after values that are.
    median : ndarray (steps,)
        The running median; NaN for the first values.
    """

    distance: NDArray[np.float64]
    median: NDArray[np.float64]


def running_band(values: NDArray[np.float64]) -> Band:
    r"""Compare each value of a series with the band of the values before it.

    The band of :math:`x_t` is made of the last 20 values before it that were inside their own bands,
    so that the beginning of a change does not become usual:

    .. math:: d_t = |x_t - m_t| / h_t, \quad h_t = \max(8 \cdot 1.4826 \, \mathrm{MAD}_t, \; 2 \max_i |x_i - m_t|, \; 0.05 |m_t|)

    with the median :math:`m`, the median absolute deviation MAD, and :math:`x_i` in the band; the second term is for values that
    are mostly equal.  Positive series are compared as logarithms, where
    0.05 replaces :math:`0.05 |m_t|`.  After 20 values in a row outside the band begins anew with these.
    A band needs 5 values.

    Parameters
    ----------
    values : ndarray (steps,)
        The series.

    Examples
    --------
    >>> found = running_band(np.array([1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 40.0, 1.0]))
    >>> (found.distance > 1).nonzero()[0].tolist(), round(float(found.median[6]), 2)
    ([6], 1.0)
    """
    distance, medians = np.zeros(len(values)), np.full(len(values), np.nan)
    finite = np.isfinite(values)
    is_positive = bool(finite.any()) and bool((values[finite] > 0).all())
    shown = np.log(values, out=np.full(len(values), np.nan), where=finite) if is_positive else values
    usual: list[float] = []
    away: list[float] = []
    for i, value in enumerate(shown.tolist()):
        if len(usual) >= _LEAST:
            band = usual[-_WINDOW:]
            middle = median(band)
            medians[i] = math.exp(middle) if is_positive else middle
            away_usually = [abs(each - middle) for each in band]
            half = max(_WIDTH * _SCALE * median(away_usually), 2 * max(away_usually))
            half = max(half, _TOLERANCE if is_positive else _TOLERANCE * abs(middle))
            difference = abs(value - middle) if finite[i] else math.inf
            distance[i] = difference / half if half else (math.inf if difference else 0.0)
        if not finite[i]:
            continue
        if distance[i] <= 1:
            usual.append(value)
            away = []
        else:
            away.append(value)
            if len(away) >= _WINDOW:
                usual, away = away, []
    return Band(distance, medians)


_CLASS = 5  # rows of a class that are compared with each other alone


def unusual_rows(
    values: NDArray[np.float64], classes: Sequence[str] | None = None, worse: int = 0
) -> NDArray[np.float64]:
    r"""Return how unusual each row is among the rows of its class: larger means more unusual.

    Rows of classes with fewer than five are compared with each other, if they are at least five together; otherwise they have 0.

    The largest over columns of :math:`|y_{ij} - m_j| / (1.4826 \, \mathrm{MAD}_j)`, with median and MAD over the rows of a column,
    where :math:`y = \log_{10} |x|`.  A row with a value that is zero where most rows are not has at least :math:`10^3`.
    Infinite values count as infinite, and NaN as no value.  The MAD is at least 0.05.

    Parameters
    ----------
    values : ndarray (rows, columns)
        The values.
    classes : sequence of str, optional
        The class of each row; by default all rows are compared.
    worse : int
        1 if only values above the median count, -1 if only those below it do, 0 if both do.

    Examples
    --------
    >>> unusual_rows(np.array([[1.0, 1.1], [1.2, 1.0], [0.0, 0.0], [1.1, 1.3], [1.0, 900.0]])).argsort()[-2:].tolist()
    [4, 2]
    """
    if classes is None:
        return _unusual(_without_better(values, worse))
    numbers = np.unique(classes, return_inverse=True)[1]
    small = np.bincount(numbers, minlength=1) < _CLASS
    numbers[small[numbers]] = -1
    found = np.zeros(len(values))
    for number in np.unique(numbers):
        own = numbers == number
        if own.sum() >= _CLASS:
            found[own] = _unusual(_without_better(values[own], worse))
    return found


def _without_better(values: NDArray[np.float64], worse: int) -> NDArray[np.float64]:
    """Return values in which what is better than the median of its column is replaced by the median."""
    if not worse or not values.size:
        return values
    with np.errstate(all="ignore"):
        middle = _medians(np.where(np.isfinite(values), values, np.nan))
        return np.where(worse * (values - middle) < 0, middle, values)


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each column without NaN, without a warning for a column that has nothing else."""
    found, filled = np.full(values.shape[1], np.nan), ~np.isnan(values).all(axis=0)
    found[filled] = np.nanmedian(values[:, filled], axis=0)
    return found


def _unusual(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if not values.size:
        return np.zeros(len(values))
    with np.errstate(all="ignore"):
        size = np.where(values == 0, np.nan, np.log10(np.abs(values)))
        size[np.isinf(values)] = np.nan
        distance = np.abs(size - _medians(size))
        away = np.nan_to_num(distance / (_SCALE * np.maximum(_medians(distance), 0.05)))
        rare = (values == 0).sum(axis=0) < 0.5 * (~np.isnan(values)).sum(axis=0)
    away[(values == 0) & rare] += 1e3
    away[np.isinf(values)] = np.inf
    found: NDArray[np.float64] = away.max(axis=1)
    return found


def quartiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return minimum, quartiles and maximum of each column without NaN; ``numpy.nanpercentile`` takes far longer."""
    if not values.size:
        return np.empty((5, values.shape[1]))
    ordered = np.sort(values, axis=0)  # NaN at the end
    places = np.array([0, 0.25, 0.5, 0.75, 1])[:, None] * ((~np.isnan(values)).sum(axis=0) - 1)
    low = np.take_along_axis(ordered, np.floor(places).astype(int), axis=0)
    high = np.take_along_axis(ordered, np.ceil(places).astype(int), axis=0)
    found: NDArray[np.float64] = low + (places % 1) * (high - low)
    return found
