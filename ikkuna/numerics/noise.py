r"""The noise of a gradient, from its squared norms at two batch sizes or over micro-batches.

With :math:`G` the true gradient and :math:`\Sigma` the covariance of one sample's gradient, a batch of :math:`B`
samples has
:math:`E |g|^2 = |G|^2 + \operatorname{tr} \Sigma / B`.  Two batch sizes give both terms without bias.
Their ratio is not unbiased (of two micro-batches of 16 and for a true value of 330 its median is 121, and it has no
mean), so
average the terms over
steps with :class:`RunningNoise` and divide last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ikkuna.errors import ConfigError

__all__ = [
    "NoiseScale",
    "RunningMean",
    "RunningNoise",
    "micro_batch_noise_scale",
    "noise_scale",
    "pairwise_noise_scale",
]


class NoiseScale(NamedTuple):
    r"""Estimates :math:`\operatorname{tr} \Sigma`, :math:`|G|^2`, and their ratio in samples (NaN for :math:`|G|^2
    \le 0`).
    """

    trace: float
    grad_sq: float
    ratio: float


def _scale(trace: float, grad_sq: float) -> NoiseScale:
    return NoiseScale(trace, grad_sq, trace / grad_sq if grad_sq > 0 else math.nan)


def noise_scale(small_sq: float, big_sq: float, small_batch: float, big_batch: float) -> NoiseScale:
    r"""Estimate the gradient noise scale from squared gradient norms at two batch sizes.

    .. math::
        |G|^2 = \frac{B |g_B|^2 - b |g_b|^2}{B - b}, \qquad
        \operatorname{tr} \Sigma = \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B}, \qquad B_{simple} = \frac{\operatorname{tr}
        \Sigma}{|G|^2}

    Parameters
    ----------
    small_sq, big_sq : float
        Squared norms :math:`|g_b|^2`, :math:`|g_B|^2` of *mean* gradients; the mean over several small batches is
        better than one.
    small_batch, big_batch : float
        :math:`b < B`, in samples, or in tokens if the noise is to be that of a token.

    Returns
    -------
    NoiseScale
        Both terms are unbiased, and may be negative where noise is strong.  `ratio` in samples: a batch far below it
        is nearly free
        to grow, one far above it is wasted.  NaN if :math:`|G|^2 \le 0`: take more micro-batches, or a longer average.
        All NaN for batches that do not differ or are not positive, and for squares that are not finite.

    References
    ----------
    S. McCandlish et al., An empirical model of large-batch training, 2018.

    Examples
    --------
    >>> noise_scale(small_sq=5.0, big_sq=2.0, small_batch=1, big_batch=4)      # |G|^2 = 1, trace = 4
    NoiseScale(trace=4.0, grad_sq=1.0, ratio=4.0)
    """
    finite = math.isfinite(small_sq) and math.isfinite(big_sq)
    if not (finite and small_batch > 0 and big_batch > 0 and small_batch != big_batch):
        return NoiseScale(math.nan, math.nan, math.nan)
    grad_sq = (big_batch * big_sq - small_batch * small_sq) / (big_batch - small_batch)
    return _scale((small_sq - big_sq) / (1 / small_batch - 1 / big_batch), grad_sq)


def micro_batch_noise_scale(squares: Sequence[float], mean_square: float, sizes: float | Sequence[float]) -> NoiseScale:
    r"""Estimate the gradient noise scale from the gradients of :math:`K` micro-batches, or of :math:`K` ranks.

    With shares :math:`w_i = b_i / B` the weighted mean of :math:`|g_i|^2` has the expectation
    :math:`|G|^2 + K \operatorname{tr} \Sigma / B`, for sizes that differ too; equal ones give :func:`noise_scale` of
    their mean.

    Parameters
    ----------
    squares : sequence of float
        ``(K,)``, :math:`|g_i|^2` of each micro-batch's mean gradient.  If the loss is divided by K, multiply by
        :math:`K^2` first.
    mean_square : float
        :math:`|\sum_i w_i g_i|^2`, of the gradient over all of them.
    sizes : float or sequence of float
        :math:`b_i`, in samples or tokens.

    Returns
    -------
    NoiseScale
        As :func:`noise_scale`; all NaN for fewer than two micro-batches.

    Examples
    --------
    >>> micro_batch_noise_scale([4.0, 6.0, 5.0, 5.0], 2.0, sizes=1)
    NoiseScale(trace=4.0, grad_sq=1.0, ratio=4.0)
    """
    count = len(squares)
    parts = [float(sizes)] * count if isinstance(sizes, (int, float)) else [float(s) for s in sizes]
    if len(parts) != count:
        raise ConfigError(f"micro_batch_noise_scale needs a size for each of {count} squares, got {len(parts)}")
    total = math.fsum(parts)
    if count < 2 or min(parts) <= 0 or not all(map(math.isfinite, (*squares, mean_square))):
        return NoiseScale(math.nan, math.nan, math.nan)
    weighted = math.fsum(s * b for s, b in zip(squares, parts, strict=True)) / total
    trace = (weighted - mean_square) * total / (count - 1)
    return _scale(trace, mean_square - trace / total)


def pairwise_noise_scale(mean_square: float, mean_product: float, batch: float) -> NoiseScale:
    r"""Estimate the gradient noise scale from the products of gradients of independent batches of one size.

    .. math::
        |G|^2 = E \langle g_i, g_j \rangle, \quad i \ne j, \qquad
        \operatorname{tr} \Sigma = b \, (E |g_i|^2 - |G|^2)

    Over all pairs of K batches it is :func:`micro_batch_noise_scale`, without the difference of large numbers.
    Batches are micro-batches, ranks, or steps between which the weights hardly move; sums over any of them add up.

    Parameters
    ----------
    mean_square : float
        Mean of :math:`|g_i|^2`, of *mean* gradients over `batch` samples.
    mean_product : float
        Mean of :math:`\langle g_i, g_j \rangle` over pairs.
    batch : float
        :math:`b`, in samples, or in tokens if the noise is to be that of a token.

    Returns
    -------
    NoiseScale
        As :func:`noise_scale`; all NaN for a batch that is not positive and for terms that are not finite.

    Examples
    --------
    >>> pairwise_noise_scale(mean_square=5.0, mean_product=1.0, batch=1)
    NoiseScale(trace=4.0, grad_sq=1.0, ratio=4.0)
    """
    if not (math.isfinite(mean_square) and math.isfinite(mean_product) and batch > 0):
        return NoiseScale(math.nan, math.nan, math.nan)
    return _scale(batch * (mean_square - mean_product), mean_product)


@dataclass
class RunningMean:
    r"""An exponential mean without the bias of its start: :math:`\sum_i \beta^{t-i} x_i / \sum_i \beta^{t-i}`.

    Values that are not finite are counted in `skipped` and change nothing.

    Parameters
    ----------
    beta : in [0, 1); the mean reaches back over about ``1 / (1 - beta)`` values

    Examples
    --------
    >>> mean = RunningMean(0.99)
    >>> for _ in range(5):
    ...     mean.update(7.0)
    >>> round(mean.value, 9)
    7.0
    """

    beta: float
    skipped: int = 0
    _sum: float = 0.0
    _weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ConfigError(f"beta of a running mean is in [0, 1), got {self.beta!r}")

    def update(self, x: float) -> None:
        """Add a value."""
        if not math.isfinite(x):
            self.skipped += 1
            return
        self._sum = self.beta * self._sum + (1 - self.beta) * x
        self._weight = self.beta * self._weight + (1 - self.beta)

    @property
    def value(self) -> float:
        """The mean; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan


@dataclass
class RunningNoise:
    r"""A noise scale over steps: running means of both terms, divided last.

    Parameters
    ----------
    beta : in [0, 1), of :class:`RunningMean`; 0.99 to 0.9998

    Examples
    --------
    >>> noise = RunningNoise(0.9)
    >>> noise.update(NoiseScale(4.0, -1.0, math.nan))
    >>> noise.update(NoiseScale(4.0, 2.0, 2.0))
    >>> round(noise.value.trace, 6), round(noise.value.grad_sq, 3), round(noise.value.ratio, 1)
    (4.0, 0.579, 6.9)
    """

    beta: float
    _trace: RunningMean = field(init=False)
    _grad_sq: RunningMean = field(init=False)

    def __post_init__(self) -> None:
        self._trace, self._grad_sq = RunningMean(self.beta), RunningMean(self.beta)

    def update(self, noise: NoiseScale) -> None:
        """Add one step's estimate; one that is not finite is left out whole."""
        finite = math.isfinite(noise.trace) and math.isfinite(noise.grad_sq)
        self._trace.update(noise.trace if finite else math.nan)
        self._grad_sq.update(noise.grad_sq if finite else math.nan)

    @property
    def value(self) -> NoiseScale:
        """The estimate so far."""
        return _scale(self._trace.value, self._grad_sq.value)
