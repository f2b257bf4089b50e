r"""How far a value, such as the loss of a step, is above the values before it."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMIT = 10.0
"""A value with a larger score is a spike."""

_LEVEL = 32
_WINDOW = 128
_ENOUGH = 48
_PACE = 16
_MEMORY = 512
_RARE = 32
_NORMAL = 2.2  # the distance that one value in 32 exceeds if the noise is normal
_SHARE = 5e-4
_FAR = 6.0
_SCALE = 0.66  # the median deviation of normal noise over the root mean square of distances from a median of 32 values


class SpikeScore:
    r"""The running spike score of a series: the distance above its local trend in units of the usual distance above it.

    .. math:: s_t = \frac{\min(x_t - m, \; \tfrac 3 2 (x_t - \max(x_{t-4}, \dots, x_{t-1})))}{w \, u},
        \quad m = \max(\ell + c, \; \min_i x_i)

    with the median :math:`\ell` and the minimum of the last 32 values :math:`x_i`; the second distance is for series that drift.
    Each value leaves a residual :math:`r = x - \ell` from the median that was known before it, and :math:`c` is the median of the last
    128 residuals, without those of the first half of the series if 32 remain: a series that falls is predicted to fall as it did.
    The unit is the usual distance of a residual above :math:`c`, which is the median deviation if the noise is normal:

    .. math:: u = \max\left(0.66 \, \sqrt{\mathrm{mean}_{r_i > c} \min(r_i - c, 6 d)^2}, \; \tfrac{1}{2000} M\right),
        \quad d = \mathrm{median}_{r_i > c} (r_i - c)

    The distances below do not count, because losses are skewed, and the limit of :math:`6 d` is for earlier spikes.
    :math:`M` is the largest :math:`|m|` of the last 512 values: a rise of less than half a percent of what a loss has just been, as
    that of one sample after all are fitted, is no spike.
    The factor :math:`w` widens the unit if the noise has a heavy tail, as the loss of single samples, of a game or of a reward has:

    .. math:: w = \max\left(1, \; \min\left(\left(\frac{q}{2.2 \, (1 + 4 / \sqrt n)}\right)^3, p\right), \;
        \frac{\min(r, 25)}{4} \right)

    where one in 32 of the last :math:`n \leq 512` values of :math:`w u s / v` is larger than :math:`q`, which is 2.2 for normal noise,
    :math:`p` is the largest of them over :math:`u / v`, so that a value about ten times as far is a spike,
    and :math:`r` is the third largest: what happens again and again is usual, unless it is very large.
    Here :math:`v = \max(\mathrm{median}_i |r_i - c|, M / 2000)` is a unit that a heavy tail does not widen.
    Median, unit and factor are computed again after every 16 values, so most values cost one comparison with `threshold`.

    The first 16 finite values have the score NaN, and with i < 48 values the unit is :math:`48 / i` times as large.
    If more than half of the 32 values equal their median, or a quarter their minimum, the unit is the largest residual that the series
    has had, if this is larger; without any, a value above 48 equal ones has an infinite score.
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
    [nan, nan, -2.121, -1.212]
    >>> round(score.threshold, 6), round(score.add(2.06), 6), score.add(math.inf)
    (1.4, 30.0, inf)
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.threshold = math.inf
        self.count = 0
        self._level = self._middle = self._unit = self._deviation = math.nan
        self._width = 1.0
        self._largest = 0.0
        self._values: deque[float] = deque(maxlen=_LEVEL)
        self._residuals: deque[float] = deque(maxlen=_WINDOW)
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
        return math.inf if distance > 0 and self.count >= _ENOUGH else min(distance, 0.0)

    def _update(self) -> None:
        """Compute the trend, the unit, the factor and the threshold."""
        values = np.array(self._values)
        is_first = self.count == _PACE
        if is_first:
            self._level = _median(values)
        residuals = values[-_PACE:] - self._level
        self._residuals.extend(residuals.tolist())
        if is_first:
            self._measure(values)
        recent = values[-_PACE - 4 :]
        pairs = np.maximum(recent[:-2], recent[1:-1])
        highest = np.maximum(pairs[:-2], pairs[2:])  # of the four values before
        distances = np.minimum(recent[4:] - self._middle, 1.5 * (recent[4:] - highest))
        if self._deviation:  # otherwise nothing is known of the noise
            self._distances.extend((distances / self._deviation).tolist())
        self._largest = max(self._largest, float(np.abs(residuals).max()))
        self._measure(values)
        count = len(values)
        if 2 * np.count_nonzero(values == self._level) > count or 4 * np.count_nonzero(values == values.min()) > count:
            self._unit = max(self._unit, self._largest)
        ratio = self._unit / self._deviation if self._deviation else 1.0
        self._width = _width(np.array(self._distances), ratio) * max(_ENOUGH / self.count, 1)
        self.threshold = self._middle + LIMIT * self._width * self._unit

    def _measure(self, values: NDArray[np.float64]) -> None:
        """Compute the trend and the unit."""
        residuals = np.sort(np.array(self._residuals)[-max(self.count // 2, _LEVEL) :])
        self._level, trend = _median(values), _median(residuals)
        self._middle = max(self._level + trend, float(values.min()))
        self._levels.append(abs(self._middle))
        least = _SHARE * max(self._levels)
        above = residuals[len(residuals) // 2 :] - trend
        usual = _median(above)
        spread = _SCALE * usual * math.sqrt(np.square(np.minimum(above / usual, _FAR)).mean()) if usual else 0.0
        self._unit, self._deviation = max(spread, least), max(_median(np.abs(residuals - trend)), least)


def _median(values: NDArray[np.float64]) -> float:
    """Return what `numpy.median` returns of finite values, in a tenth of its time."""
    ordered = np.sort(values)
    return float(0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]))


def _width(distances: NDArray[np.float64], ratio: float) -> float:
    """Return the factor of the unit, which is `ratio` times that of the distances."""
    if not (count := len(distances)):
        return 1.0
    rank = count - 1 - count // _RARE
    part = np.partition(distances, (rank, count - 3))
    heavy = max(part[rank] / (_NORMAL * (1 + 4 / math.sqrt(count))), 0.0) ** 3
    return float(max(1.0, min(heavy, part[-3:].max() / ratio), min(part[count - 3], 25.0) / 4))


def spike_scores(values: Iterable[Any]) -> NDArray[np.float64]:
    """Return the spike score of each value of a series, see `SpikeScore`.

    Examples
    --------
    >>> spike_scores([1.0] * 64 + [1.0, 2.0, math.nan])[63:].tolist()
    [0.0, 0.0, 2000.0, inf]
    """
    score = SpikeScore()
    return np.array([score.add(float(value)) for value in values])
