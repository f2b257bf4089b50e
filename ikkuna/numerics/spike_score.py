r"""How far a value, such as the loss of a step, is above the values before it."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 10.0
"""A value with a larger score is a spike."""

_WINDOW = 128
_ENOUGH = 64
_PACE = 16
_MEMORY = 512
_RARE = 32
_NORMAL = 2.2  # the distance that one value in 32 exceeds if the noise is normal
_SHARE = 5e-4


class SpikeScore:
    r"""The running spike score of a series: the distance above a running median in units of a running median deviation.

    .. math:: s_t = \frac{\min(x_t - m, \; \tfrac 3 2 (x_t - \max(x_{t-4}, \dots, x_{t-1})))}{w \, u},
        \quad u = \max(\mathrm{median}_i |x_i - m|, \; \tfrac{1}{2000} M)

    with the median :math:`m` of the last 128 values :math:`x_i`; the second distance is for series that drift.
    :math:`M` is the largest such :math:`|m|` of the last 512 values: a rise of less than half a percent of what a loss has just been, as
    that of one sample after all are fitted, is no spike.
    The factor :math:`w` widens the unit if the noise has a heavy tail, as the loss of single samples, of a game or of a reward has:

    .. math:: w = \max\left(1, \; \left(\frac{q}{2.2 \, (1 + 4 / \sqrt n)}\right)^3, \; \frac{\min(r, 25)}{4} \right)

    where one in 32 of the last :math:`n \leq 512` values of :math:`w s` is larger than :math:`q`, which is 2.2 for normal noise,
    and :math:`r` is the third largest of them: what happens again and again is usual, unless it is very large.
    Median, unit and factor are computed again after every 16 values, so most values cost one comparison with `threshold`.

    The first 16 finite values have the score NaN, and with i < 64 values the unit is :math:`64 / i` times as large.
    If more than half of the window equals the median, or a quarter the smallest value, the unit is the largest distance from a median
    that the series has had, if this is larger; without any, a value above 64 equal ones has an infinite score.
    NaN and infinite values have an infinite score if a finite value came before, and otherwise NaN; they are not part of the window.

    Attributes
    ----------
    threshold : float
        Only a value that is not at most this can be a spike; infinite as long as scores are undefined.
    count : int
        Number of finite values so far.

    Examples
    --------
    >>> score, losses = SpikeScore(), [1 + 0.01 * (i % 5) for i in range(64)]
    >>> [round(score.add(loss), 6) for loss in losses][14:20]
    [nan, nan, -1.125, -0.75, -0.375, 0.375]
    >>> round(score.threshold, 6), round(score.add(1.32), 6), score.add(math.inf)
    (1.12, 30.0, inf)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.threshold = math.inf
        self.count = 0
        self._middle, self._unit, self._width = math.nan, math.nan, 1.0
        self._largest = 0.0
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._distances: deque[float] = deque(maxlen=_MEMORY)
        self._levels: deque[float] = deque(maxlen=_MEMORY // _PACE)

    def add(self, value: float) -> float:
        """Add a value, and return its score."""
        score = self.of(value)
        if value - value == 0:
            self._values.append(value)
            self.count += 1
            if not self.count % _PACE:
                self._update()
        return score

    def of(self, value: float) -> float:
        """Return the score that a value would have now."""
        if value - value != 0:
            return math.inf if self.count else math.nan
        if self.count < _PACE:
            return math.nan
        before = self._values
        distance = min(value - self._middle, 1.5 * (value - max(before[-1], before[-2], before[-3], before[-4])))
        if unit := self._width * self._unit:
            return distance / unit
        return math.inf if distance > 0 and len(before) >= _ENOUGH else min(distance, 0.0)

    def _update(self) -> None:
        """Compute the median, the unit, the factor and the threshold."""
        values = np.array(self._values)
        if self.count == _PACE:
            self._measure(values)
        recent = values[-_PACE - 4 :]
        pairs = np.maximum(recent[:-2], recent[1:-1])
        highest = np.maximum(pairs[:-2], pairs[2:])  # of the four values before
        distances = np.minimum(recent[4:] - self._middle, 1.5 * (recent[4:] - highest))
        if self._unit:  # otherwise nothing is known of the noise
            self._distances.extend((distances / self._unit).tolist())
        self._largest = max(self._largest, float(np.abs(values[-_PACE:] - self._middle).max()))
        self._measure(values)
        count = len(values)
        if 2 * np.count_nonzero(values == self._middle) > count or 4 * np.count_nonzero(values == values.min()) > count:
            self._unit = max(self._unit, self._largest)
        self._width = _width(np.array(self._distances)) * max(_ENOUGH / count, 1)
        self.threshold = self._middle + LIMIT * self._width * self._unit

    def _measure(self, values: NDArray[np.float64]) -> None:
        """Compute the median and the unit."""
        self._middle = _median(values)
        self._levels.append(abs(self._middle))
        self._unit = max(_median(np.abs(values - self._middle)), _SHARE * max(self._levels))


def _median(values: NDArray[np.float64]) -> float:
    """Return what `numpy.median` returns of finite values, in a tenth of its time."""
    ordered = np.sort(values)
    return float(0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]))


def _width(distances: NDArray[np.float64]) -> float:
    """Return the factor of the unit."""
    if not (count := len(distances)):
        return 1.0
    rank = count - 1 - count // _RARE
    part = np.partition(distances, (rank, count - 3))
    heavy = max(part[rank] / (_NORMAL * (1 + 4 / math.sqrt(count))), 0.0) ** 3
    return float(max(1.0, heavy, min(part[count - 3], 25.0) / 4))


def spike_scores(values: Iterable[Any]) -> NDArray[np.float64]:
    """Return the spike score of each value of a series, see `SpikeScore`.

    Examples
    --------
    >>> spike_scores([1.0] * 64 + [1.0, 2.0, math.nan])[63:].tolist()
    [0.0, 0.0, 2000.0, inf]
    """
    score = SpikeScore()
    return np.array([score.add(float(value)) for value in values])
