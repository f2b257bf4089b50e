r"""How far a value, such as the loss of a step, is above the values before it."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 10.0
"""A value with a larger score is a spike."""

_LEVEL = 32
_RESIDUALS = 128
_PACE = 16
_RECENT = 128
_MEMORY = 4096
_FIRST = 64
_EARLY = 96
_TAIL = 512
_LEVELS = 512
_SHARE = 5e-4
_NORMAL = 1.4826  # the standard deviation of normal noise over its median deviation
_FACTORS = 4.0, 16.0
_LONG = 0.75
_RARE = 1e5
_SPREAD = 0.3  # of the logarithm of the farthest of 16 values of normal noise
_PRIOR = 16


class SpikeScore:
    r"""The running spike score of a series: the distance above its trend in robust deviations, or more for a heavy tail.

    .. math:: s_t = \frac{\min(x_t - m, \; \tfrac 3 2 (x_t - \max(x_{t-4}, \dots, x_{t-1})))}{u},
        \quad m = \max(\ell + c, \; \min_i x_i)

    with the median :math:`\ell` and the minimum of the last 32 values :math:`x_i`; the second distance is for series that drift.
    Each value leaves a residual :math:`r = x - \ell` from the median that was known before it, and :math:`c` is the median of the last
    128 residuals, without those of the first half of the series if 32 remain: a series that falls is predicted to fall as it did.
    The unit is the largest of three:

    .. math:: u = \max\left(\sigma, \; \frac{k}{10} \max_{128} d, \; \frac{3 k}{40} \, \sigma \max_{4096} \frac{d}{\sigma_d} \right),
        \quad \sigma = \max\left(1.4826 \, \mathrm{median}_{r_i > c} (r_i - c), \; \tfrac{1}{2000} M\right)

    The first, :math:`\sigma`, is the median deviation above the trend, scaled to the standard deviation of normal noise: the distances
    below do not count, because losses are skewed.  :math:`M` is the largest :math:`|m|` of the last 512 values: a rise of less than half
    a percent of what a loss has just been, as that of one sample after all are fitted, is no spike.

    The others compare with the tail that the series itself has shown: a spike is *k* times as far as the farthest of the last 128 values.
    Of the last 4096 values without the first 64, it is :math:`3 k / 4` times as far as the farthest, in units of the deviation
    :math:`\sigma_d` of that time.  The distance :math:`d` is the numerator above, but at most ten units of its time, so that a spike
    raises the limit to *k* times what it was, however large it is.  The factor *k* extrapolates a tail of the index :math:`\gamma`:

    .. math:: k = \min(\max((100{,}000 / n)^\gamma, 4), 16), \quad \gamma = \frac{\sqrt 6}{\pi} \mathrm{std}(\log d_i / \sigma_d)

    where :math:`d_i` are the farthest of each 16 values, without the first 64 and those with a spike, and *n* is the number of values
    so far, at most 512.  If a distance above *d* has the probability :math:`d^{-1/\gamma}`, their logarithms have a Gumbel distribution
    with this deviation, and one of 100,000 values is *k* times as far as the farthest of *n*.  Their variance is averaged with 16 times
    that of normal noise, 0.3², so that few values leave the factor at 4.  It is up to 16 for losses without a variance, such as the
    square of an error with outliers.

    Trend, deviation and unit are computed again after every 16 values, so most values cost one comparison with `threshold`.
    The first 16 finite values have the score NaN; then the deviation of 16 values counts twice, and the tail of :math:`i < 96` values
    :math:`96 / i` times, because it is not known yet how heavy it is.
    If more than half of the 32 values equal their median, or a quarter their minimum, the unit is the largest residual that the series
    has had, if this is larger; without any, a value above 32 equal ones has an infinite score.
    NaN and infinite values have an infinite score if a finite value came before, and otherwise NaN; they are not part of the window.

    Attributes
    ----------
    threshold : float
        Only a value that is not at most this can be a spike; infinite as long as scores are undefined.
    count : int
        Number of finite values so far.

    Examples
    --------
    >>> score, losses = SpikeScore(), [1 + 0.01 * (0, 6, 8, 14)[i % 4] for i in range(64)]
    >>> [round(score.add(loss), 3) for loss in losses][14:18]
    [nan, nan, -1.771, -1.012]
    >>> round(score.threshold, 6), round(score.add(2.06), 6), score.add(math.inf)
    (1.66304, 16.693646, inf)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.threshold = math.inf
        self.count = 0
        self._level = self._middle = self._unit = self._deviation = math.nan
        self._largest = 0.0
        self._values: deque[float] = deque(maxlen=_LEVEL)
        self._residuals: deque[float] = deque(maxlen=_RESIDUALS)
        self._levels: deque[float] = deque(maxlen=_LEVELS // _PACE)
        self._recent: deque[float] = deque(maxlen=_RECENT // _PACE)  # the largest distance of each 16 values
        self._ratios: deque[float] = deque(maxlen=_MEMORY // _PACE)  # over the deviation
        self._usual: deque[float] = deque(maxlen=_TAIL // _PACE)  # their logarithms, without spikes

    def add(self, value: float) -> float:
        """Add a value, and return its score."""
        score = self.of(value)
        if value - value == 0:
            self._values.append(value)
            self.count += 1
            if not self.count % _PACE:
                self._update()
        return score

    def add_until_spike(self, values: Iterable[float]) -> list[float]:
        """Add values up to the first one whose score is above 10, and return their scores."""
        scores: list[float] = []
        for value in values:
            scores.append(score := self.add(value))
            if score > LIMIT:
                break
        return scores

    def of(self, value: float) -> float:
        """Return the score that a value would have now."""
        if value - value != 0:
            return math.inf if self.count else math.nan
        if self.count < _PACE:
            return math.nan
        before = self._values
        distance = min(value - self._middle, 1.5 * (value - max(before[-1], before[-2], before[-3], before[-4])))
        if self._unit:
            return distance / self._unit
        return math.inf if distance > 0 and self.count >= _LEVEL else min(distance, 0.0)

    def _update(self) -> None:
        """Add the last 16 values to the memory, and compute the trend, the unit and the threshold again."""
        values = np.array(self._values)
        is_first = self.count == _PACE
        if is_first:
            self._level = _median(values)
        residuals = values[-_PACE:] - self._level
        self._residuals.extend(residuals.tolist())
        self._largest = max(self._largest, float(np.abs(residuals).max()))
        if is_first:  # otherwise the distances are those from the trend that was known before these values
            self._measure(values)
        farthest, limit = _farthest(values, self._middle), math.inf if is_first else LIMIT * self._unit
        self._recent.append(min(farthest, limit))
        if self._deviation and self.count > _FIRST:  # the first deviations are those of few values
            self._ratios.append(min(farthest, limit) / self._deviation)
            if farthest <= limit:
                self._usual.append(math.log(max(farthest / self._deviation, 0.5)))
        self._measure(values)
        tail = max(max(self._recent), _LONG * self._deviation * max(self._ratios, default=0.0))
        tail *= max(_EARLY / self.count, 1) * _factor(self._usual, min(self.count, _TAIL)) / LIMIT
        unit, count = max(self._deviation * max(_LEVEL / self.count, 1), tail), len(values)
        if 2 * np.count_nonzero(values == self._level) > count or 4 * np.count_nonzero(values == values.min()) > count:
            unit = max(unit, self._largest)
        self._unit = unit
        self.threshold = self._middle + LIMIT * self._unit

    def _measure(self, values: NDArray[np.float64]) -> None:
        """Compute the trend and the deviation."""
        residuals = np.sort(np.array(self._residuals)[-max(self.count // 2, _LEVEL) :])
        self._level, trend = _median(values), _median(residuals)
        self._middle = max(self._level + trend, float(values.min()))
        self._levels.append(abs(self._middle))
        above = residuals[len(residuals) // 2 :] - trend
        self._deviation = max(_NORMAL * _median(above), _SHARE * max(self._levels))


def _farthest(values: NDArray[np.float64], middle: float) -> float:
    """Return the largest distance of the last 16 values."""
    recent = values[-_PACE - 4 :]
    pairs = np.maximum(recent[:-2], recent[1:-1])
    highest = np.maximum(pairs[:-2], pairs[2:])  # of the four values before
    return float(np.minimum(recent[4:] - middle, 1.5 * (recent[4:] - highest)).max())


def _factor(logarithms: Sequence[float], values: int) -> float:
    """Return how many times as far as the farthest of a number of values a spike is, from the farthest of each 16 of them."""
    if (count := len(logarithms)) < 2:
        return _FACTORS[0]
    recent = np.array(logarithms)
    total = np.square(recent - recent.mean()).sum() + _PRIOR * _SPREAD**2
    index = math.sqrt(6 * total / (count - 1 + _PRIOR)) / math.pi
    return float(min(max((_RARE / values) ** index, _FACTORS[0]), _FACTORS[1]))


def _median(values: NDArray[np.float64]) -> float:
    """Return what `numpy.median` returns of finite values, in a tenth of its time."""
    ordered = np.sort(values)
    return float(0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]))


def spike_scores(values: Iterable[Any]) -> NDArray[np.float64]:
    """Return the spike score of each value of a series, see `SpikeScore`.

    Examples
    --------
    >>> spike_scores([1.0] * 64 + [1.0, 2.0, math.nan])[63:].tolist()
    [0.0, 0.0, 2000.0, inf]
    """
    score = SpikeScore()
    return np.array([score.add(float(value)) for value in values])
