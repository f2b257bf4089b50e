"""How far gradients of one parameter agree with each other."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ikkuna.errors import ConfigError

__all__ = ["adam_snr", "gradient_diversity", "gradient_snr"]


def gradient_snr(mean: Tensor, m2: Tensor, count: int, reduction: str = "mean") -> Tensor:
    r"""Return the signal-to-noise ratio of a gradient, :math:`\bar g_j^2 / \operatorname{var}(g_j)`, over its
    elements :math:`j`.

    Parameters
    ----------
    mean, m2 : Tensor
        The same shape: mean of each element over :math:`K` micro-batches, and sum of squared deviations from it.
    count : int
        :math:`K`; the variance is ``m2 / (K - 1)``.
    reduction : {'mean', 'median'}
        Over elements; the ratio has heavy tails, so the median is steadier.

    Returns
    -------
    Tensor
        0-d, float64, dimensionless, at least 0.  Elements without variance are left out; NaN if none is left, if K < 2,
        or if an element is not finite.
        Pure noise reads ``1 / K`` and more.

    References
    ----------
    J. Liu et al., Understanding why neural networks generalize well through GSNR of parameters, 2020.

    Examples
    --------
    >>> gradient_snr(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 2.0]), count=3).item()      # of 4 / 1 and 1 / 1
    2.5
    """
    if reduction not in ("mean", "median"):
        raise ConfigError(f"reduction of gradient_snr is 'mean' or 'median', got {reduction!r}")
    variance = m2.detach().double() / (count - 1 if count > 1 else math.nan)
    ratio = torch.where(variance > 0, mean.detach().double().square() / variance, torch.nan)
    if not ratio.numel():
        return torch.tensor(torch.nan, dtype=torch.float64)
    value = ratio.nanmean() if reduction == "mean" else ratio.nanmedian()
    return torch.where(torch.isfinite(variance).all(), value, torch.nan)


def adam_snr(exp_avg: Tensor, exp_avg_sq: Tensor, step: float, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
    r"""Return the mean of :math:`|\hat m| / \sqrt{\hat v}` over elements: how of one mind Adam's gradients are.

    It costs no pass over gradients.  Near 1 they agree, near :math:`\sqrt{(1 - \beta_1) / (1 + \beta_1)} \approx
    0.23` they are noise.

    Parameters
    ----------
    exp_avg, exp_avg_sq : Tensor
        The same shape, Adam's state of one parameter.
    step : float
        Number of steps taken, for the correction of the start.
    betas : tuple of two floats
        As given to the optimizer.

    Returns
    -------
    Tensor
        0-d, float64, dimensionless, at least 0.  Elements with :math:`v = 0` are left out; NaN if none is left, or
        before a step.

    Examples
    --------
    >>> round(adam_snr(torch.tensor([0.1, 0.0]), torch.tensor([0.001, 0.0]), step=1).item(), 6)
    1.0
    """
    if step < 1 or not exp_avg.numel():
        return torch.tensor(torch.nan, dtype=torch.float64)
    m = exp_avg.detach().double().abs() / (1 - betas[0] ** step)
    v = exp_avg_sq.detach().double() / (1 - betas[1] ** step)
    return torch.where(v > 0, m / v.sqrt(), torch.nan).nanmean()


def gradient_diversity(squares: Sequence[float], mean_square: float) -> float:
    r"""Return :math:`\sum_i |g_i|^2 / |\sum_i g_i|^2` over :math:`K` micro-batches of one size (Yin et al. 2018).

    ``1 / K`` if all gradients are the same, 1 if they are orthogonal, more if they are in conflict.  NaN if their sum
    is 0.

    Parameters
    ----------
    squares : sequence of float
        ``(K,)``, :math:`|g_i|^2`.
    mean_square : float
        :math:`|\frac 1 K \sum_i g_i|^2`.

    Examples
    --------
    >>> gradient_diversity([4.0, 4.0], mean_square=4.0)
    0.5
    """
    whole = len(squares) ** 2 * mean_square
    return math.fsum(squares) / whole if whole > 0 else math.nan
