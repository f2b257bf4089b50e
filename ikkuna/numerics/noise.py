r"""The gradient noise scale, and the agreement between gradients of one parameter.

:math:`G` is the true gradient and :math:`\Sigma` the covariance of the gradient of one sample.
The expected squared norm of the gradient of a batch of :math:`B` samples is
:math:`E |g|^2 = |G|^2 + \operatorname{tr} \Sigma / B`, so two batch sizes give unbiased estimates of both terms.
The ratio of the two estimates is biased: for 2 micro-batches of 16 samples and a true value of 330, its median is 121
and its mean does not exist.  Average the terms over steps with :class:`RunningNoise`, which divides last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import all_finite


@dataclass(frozen=True)
class NoiseScale:
    r"""An estimate of the noise scale :math:`\operatorname{tr} \Sigma / |G|^2`.

    Both terms are unbiased and can be negative if there is much noise.

    Parameters
    ----------
    grad_sq : float
        :math:`|G|^2`, the squared norm of the true gradient.
    trace : float
        :math:`\operatorname{tr} \Sigma`, the variance of the gradient of one sample, summed over all parameters.
    batch_sizes, grad_sqs : tuple of float
        Batch sizes and the squared norms measured at them, for a plot of the line.
    """

    grad_sq: float
    trace: float
    batch_sizes: tuple[float, ...] = field(default=(), repr=False)
    grad_sqs: tuple[float, ...] = field(default=(), repr=False)

    @property
    def valid(self) -> bool:
        """Whether :math:`|G|^2 > 0`.  If not, use more micro-batches or average over more steps."""
        return self.grad_sq > 0

    @property
    def noise_scale(self) -> float:
        """The ratio, in samples; NaN if the estimate is not valid.

        A batch far below it can grow almost without loss of data efficiency; a batch far above it is wasteful.
        """
        return self.trace / self.grad_sq if self.valid else math.nan


_UNDEFINED = NoiseScale(math.nan, math.nan)


def noise_scale(small_sq: float, big_sq: float, small_batch: float, big_batch: float) -> NoiseScale:
    r"""Estimate the gradient noise scale from squared gradient norms at two batch sizes.

    .. math::
        |G|^2 = \frac{B |g_B|^2 - b |g_b|^2}{B - b}, \qquad
        \operatorname{tr} \Sigma = \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B}

    Parameters
    ----------
    small_sq, big_sq : float
        Squared norms :math:`|g_b|^2`, :math:`|g_B|^2` of *mean* gradients.  The mean over several small batches is
        more precise than a single one.
    small_batch, big_batch : float
        :math:`b < B`, in samples; in tokens for the noise of one token.

    Returns
    -------
    NoiseScale
        All NaN if the batch sizes are equal or not positive, or if a squared norm is not finite.

    References
    ----------
    S. McCandlish et al., An empirical model of large-batch training, 2018.

    Examples
    --------
    >>> noise_scale(small_sq=5.0, big_sq=2.0, small_batch=1, big_batch=4)
    NoiseScale(grad_sq=1.0, trace=4.0)
    """
    finite = math.isfinite(small_sq) and math.isfinite(big_sq)
    if not (finite and small_batch > 0 and big_batch > 0 and small_batch != big_batch):
        return _UNDEFINED
    grad_sq = (big_batch * big_sq - small_batch * small_sq) / (big_batch - small_batch)
    trace = (small_sq - big_sq) / (1 / small_batch - 1 / big_batch)
    return NoiseScale(grad_sq, trace, (small_batch, big_batch), (small_sq, big_sq))


def fit_noise_scale(
    batch_sizes: Sequence[float], grad_sqs: Sequence[float], weights: Sequence[float] | None = None
) -> NoiseScale:
    """Estimate the noise scale with a least-squares line through squared gradient norms against ``1 / batch size``.

    Parameters
    ----------
    batch_sizes : sequence of float
        At least two different batch sizes.
    grad_sqs : sequence of float
        The squared norm of the mean gradient for each batch size.
    weights : sequence of float, optional
        The weight of each point; 1 by default.

    Raises
    ------
    ConfigError
        If there are fewer than two different batch sizes, or if the sequences have different lengths.

    Examples
    --------
    >>> fit = fit_noise_scale([10, 20, 50, 100], [14.0, 9.0, 6.0, 5.0])
    >>> round(fit.grad_sq, 9), round(fit.trace, 9)
    (4.0, 100.0)
    """
    w = [1.0] * len(batch_sizes) if weights is None else list(weights)
    if not len(batch_sizes) == len(grad_sqs) == len(w):
        raise ConfigError(f"got {len(batch_sizes)} batch sizes, {len(grad_sqs)} squared norms and {len(w)} weights")
    if len(set(batch_sizes)) < 2:
        raise ConfigError("a line needs at least two different batch sizes")
    x = [1 / size for size in batch_sizes]
    total = math.fsum(w)
    mean_x = math.fsum(a * b for a, b in zip(w, x, strict=True)) / total
    mean_y = math.fsum(a * b for a, b in zip(w, grad_sqs, strict=True)) / total
    covariance = math.fsum(a * (b - mean_x) * (c - mean_y) for a, b, c in zip(w, x, grad_sqs, strict=True))
    slope = covariance / math.fsum(a * (b - mean_x) ** 2 for a, b in zip(w, x, strict=True))
    return NoiseScale(mean_y - slope * mean_x, slope, tuple(batch_sizes), tuple(grad_sqs))


def noise_scale_from_moments(gradient: Tensor, covariance: Tensor, hessian: Tensor | None = None) -> NoiseScale:
    r"""Return :math:`\operatorname{tr}(H\Sigma) / G^\top H G` of a known gradient; :math:`H = I` by default.

    Examples
    --------
    >>> G, H = torch.tensor([1.0, 4.0]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> estimate = noise_scale_from_moments(G, torch.diag(torch.tensor([2.0, 16.0])), H)
    >>> estimate.trace, estimate.grad_sq
    (66.0, 65.0)
    """
    g, s = gradient.double().reshape(-1), covariance.double()
    h = torch.eye(g.numel(), dtype=torch.float64, device="cpu") if hessian is None else hessian.double()
    return NoiseScale(float(g @ h @ g), float(torch.trace(h @ s)))


def pairwise_noise_scale(mean_square: float, mean_product: float, batch: float) -> NoiseScale:
    r"""Estimate the gradient noise scale from inner products of gradients of independent batches of one size.

    .. math::
        |G|^2 = E \langle g_i, g_j \rangle, \quad i \ne j, \qquad
        \operatorname{tr} \Sigma = b \, (E |g_i|^2 - |G|^2)

    For all pairs of K batches the result is that of :func:`noise_scale` for one batch and all K, without the difference of large
    numbers.  The batches can be micro-batches, ranks, or steps between which the weights hardly change.

    Parameters
    ----------
    mean_square : float
        Mean of :math:`|g_i|^2`, of *mean* gradients over `batch` samples.
    mean_product : float
        Mean of :math:`\langle g_i, g_j \rangle` over pairs.
    batch : float
        :math:`b`, in samples; in tokens for the noise of one token.

    Returns
    -------
    NoiseScale
        As :func:`noise_scale`; all NaN if `batch` is not positive or a term is not finite.

    Examples
    --------
    >>> pairwise_noise_scale(mean_square=5.0, mean_product=1.0, batch=1)
    NoiseScale(grad_sq=1.0, trace=4.0)
    """
    if not (math.isfinite(mean_square) and math.isfinite(mean_product) and batch > 0):
        return _UNDEFINED
    return NoiseScale(mean_product, batch * (mean_square - mean_product))


@dataclass
class RunningMean:
    r"""An exponential mean without initial bias: :math:`\sum_i \beta^{t-i} x_i / \sum_i \beta^{t-i}`.

    Values that are not finite are skipped and counted in `skipped`.

    Parameters
    ----------
    beta : float
        In [0, 1).  The mean covers about the last ``1 / (1 - beta)`` values.
    skipped : int
        The number of skipped values.

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
            raise ConfigError(f"beta of a running mean must be in [0, 1), got {self.beta!r}")

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
    r"""A noise scale over steps: both terms are averaged, then divided.

    Parameters
    ----------
    beta : float
        The `beta` of :class:`RunningMean`, usually between 0.99 and 0.9998.

    Examples
    --------
    >>> noise = RunningNoise(0.9)
    >>> noise.update(NoiseScale(grad_sq=-1.0, trace=4.0))
    >>> noise.update(NoiseScale(grad_sq=2.0, trace=4.0))
    >>> round(noise.value.trace, 6), round(noise.value.grad_sq, 3), round(noise.value.noise_scale, 1)
    (4.0, 0.579, 6.9)
    """

    beta: float
    _trace: RunningMean = field(init=False)
    _grad_sq: RunningMean = field(init=False)

    def __post_init__(self) -> None:
        self._trace, self._grad_sq = RunningMean(self.beta), RunningMean(self.beta)

    def update(self, noise: NoiseScale) -> None:
        """Add the estimate of one step.  If one of its terms is not finite, both are skipped."""
        finite = math.isfinite(noise.trace) and math.isfinite(noise.grad_sq)
        self._trace.update(noise.trace if finite else math.nan)
        self._grad_sq.update(noise.grad_sq if finite else math.nan)

    @property
    def value(self) -> NoiseScale:
        """The estimate from all steps so far."""
        return NoiseScale(self._grad_sq.value, self._trace.value)


def gradient_snr(mean: Tensor, m2: Tensor, count: int, reduction: str = "mean") -> Tensor:
    r"""Return the signal-to-noise ratio of a gradient, the average of :math:`\bar g_j^2 / \operatorname{var}(g_j)`.

    Parameters
    ----------
    mean, m2 : Tensor
        Of the same shape: the mean of each element over :math:`K` micro-batches, and the sum of squared deviations from
        it.
    count : int
        :math:`K`; the variance is ``m2 / (K - 1)``.
    reduction : {'mean', 'median'}
        The average over elements :math:`j`; the ratio has heavy tails, so the median is more stable.

    Returns
    -------
    Tensor
        0-d, float64, dimensionless, at least 0.  Elements without variance are left out; NaN if none is left, if K < 2,
        or if an element is not finite.
        For pure noise it is ``1 / K`` or more.

    References
    ----------
    J. Liu et al., Understanding why neural networks generalize well through GSNR of parameters, 2020.

    Examples
    --------
    >>> gradient_snr(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 2.0]), count=3).item()      # of 4 / 1 and 1 / 1
    2.5
    """
    if reduction not in ("mean", "median"):
        raise ConfigError(f"gradient_snr needs a reduction 'mean' or 'median', got {reduction!r}")
    variance = m2.detach().double() / (count - 1 if count > 1 else math.nan)
    ratio = torch.where(variance > 0, mean.detach().double().square() / variance, torch.nan)
    if not ratio.numel():
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    if reduction == "mean":
        value = ratio.nanmean()
    else:  # `nanmedian` is the lower of two elements in the middle, and `nanquantile` takes few elements
        value = (ratio.nanmedian() - (-ratio).nanmedian()) / 2
    return torch.where(torch.isfinite(variance).all(), value, torch.nan)


def signs_of(x: Tensor) -> Tensor:
    """Return -1, 0 or 1 for each element, in int8; 0 for all elements of a tensor with a NaN or Inf.

    Examples
    --------
    >>> signs_of(torch.tensor([-2.5, 0.0, 3.0]))
    tensor([-1,  0,  1], dtype=torch.int8)
    """
    x = x.detach()
    return x.sign().to(torch.int8) * _all_finite(x)


def sign_agreement(signs: Tensor, x: Tensor) -> Tensor:
    r"""Count the elements of which two tensors have the same sign, and those that are 0 in neither of them.

    Parameters
    ----------
    signs : Tensor
        The signs of the first tensor, from :func:`signs_of`.
    x : Tensor
        Of the same shape.

    Returns
    -------
    Tensor
        ``(2,)``, float64; the first number is NaN if `x` has a NaN or Inf.
        The counts of several parts of a tensor can be summed.

    Examples
    --------
    >>> sign_agreement(signs_of(torch.tensor([7.0, -7.0, 7.0, 0.0])), torch.tensor([2.0, 3.0, 1.0, 5.0])).tolist()
    [2.0, 3.0]
    """
    products = x.detach().sign().to(torch.int8) * signs
    counted = products.count_nonzero().double()
    same = (counted + products.sum()) / 2
    return torch.stack([torch.where(_all_finite(x.detach()), same, torch.nan), counted])


def _all_finite(x: Tensor) -> Tensor:
    finite = all_finite(x)
    return torch.ones((), dtype=torch.bool, device=x.device) if finite is None else finite
