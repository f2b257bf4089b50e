"""Agreement between the gradients of one parameter."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import all_finite

__all__ = ["adam_snr", "gradient_diversity", "gradient_snr", "sign_agreement", "signs_of"]


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
    value = ratio.nanmean() if reduction == "mean" else ratio.nanmedian()
    return torch.where(torch.isfinite(variance).all(), value, torch.nan)


def adam_snr(exp_avg: Tensor, exp_avg_sq: Tensor, step: float, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
    r"""Return the mean of :math:`|\hat m| / \sqrt{\hat v}` over elements, which measures the agreement of Adam's gradients.

    It needs no pass over gradients.  Near 1 they agree; near :math:`\sqrt{(1 - \beta_1) / (1 + \beta_1)} \approx 0.23`
    they are noise.

    Parameters
    ----------
    exp_avg, exp_avg_sq : Tensor
        Of the same shape: Adam's state of one parameter.
    step : float
        The number of steps, for the bias correction.
    betas : tuple of float
        The coefficients of the optimizer.

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
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    m = exp_avg.detach().double().abs() / (1 - betas[0] ** step)
    v = exp_avg_sq.detach().double() / (1 - betas[1] ** step)
    return torch.where(v > 0, m / v.sqrt(), torch.nan).nanmean()


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


def gradient_diversity(squares: Sequence[float], mean_square: float) -> float:
    r"""Return :math:`\sum_i |g_i|^2 / |\sum_i g_i|^2` over :math:`K` micro-batches of equal size (Yin et al. 2018).

    It is ``1 / K`` if all gradients are equal, 1 if they are orthogonal, larger if they conflict, and NaN if their sum
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
