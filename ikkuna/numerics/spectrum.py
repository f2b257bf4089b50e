r"""Condition number, ranks and the tail of the spectrum of a matrix, computed from its singular values.

Singular values are written :math:`\sigma_1 \ge \sigma_2 \ge \dots`, with :math:`\lambda = \sigma^2`,
:math:`p = \lambda / \sum \lambda` and :math:`q = \sigma / \sum \sigma`.  For every nonzero matrix, :math:`1 \le` stable
rank :math:`\le` participation ratio :math:`\le` entropy rank :math:`\le` effective rank :math:`\le` rank.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import as_float64
from ikkuna.numerics.spectral import as_matrix

__all__ = [
    "PowerLaw",
    "condition_number",
    "effective_rank",
    "entropy_rank",
    "numerical_rank",
    "participation_ratio",
    "power_law_alpha",
    "rank_tolerance",
    "singular_values",
    "singular_values_of_each",
    "stable_rank",
]


def singular_values(weight: Tensor) -> Tensor:
    r"""Return the singular values of a weight in float64, in descending order.

    Parameters
    ----------
    weight : Tensor
        ``(out, in, ...)``, read as a matrix ``(out, in * ...)``.

    Returns
    -------
    Tensor
        ``(min(out, in * ...),)``, in units of `weight`, on its device.  Values below
        :math:`\max(m, n)\, \epsilon_{64}\, \sigma_1` are rounding errors of the factorisation and become 0.  All NaN if
        an element is not finite, or for a meta tensor.

    Notes
    -----
    :math:`4 m n^2 - 4 n^3 / 3` operations and a float64 copy: half a second for 1024 x 1024.  It waits for the device.

    Examples
    --------
    >>> singular_values(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    tensor([5., 0.], dtype=torch.float64)
    """
    w = as_matrix(weight)
    if w.is_meta or not w.numel():
        size = min(w.shape) if w.is_meta else 0
        return torch.full((size,), torch.nan, dtype=torch.float64, device="cpu")
    return singular_values_of_each(w.unsqueeze(0))[0]


def singular_values_of_each(weights: Tensor) -> Tensor:
    r"""Return :func:`singular_values` of several weights of one shape, with one factorisation for all.

    Parameters
    ----------
    weights : Tensor
        ``(n, out, in, ...)``, with elements.

    Returns
    -------
    Tensor
        ``(n, min(out, in * ...))``

    Examples
    --------
    >>> singular_values_of_each(torch.stack([torch.eye(2), torch.full((2, 2), torch.nan)]))
    tensor([[1., 1.],
            [nan, nan]], dtype=torch.float64)
    """
    matrices = as_float64(torch.stack([as_matrix(weight) for weight in weights]))
    # A factorisation raises an error for a NaN, or ignores it in a triangle that it does not read.
    is_finite = matrices.isfinite().flatten(1).all(1)[:, None]
    matrices = torch.where(is_finite[..., None], matrices, 0.0)
    scale = matrices.abs().flatten(1).amax(1)[:, None]
    values = _factorised(matrices / torch.where(scale > 0, scale, 1.0)[..., None]) * scale
    noise = max(matrices.shape[1:]) * torch.finfo(torch.float64).eps * values[:, :1]
    return torch.where(is_finite, torch.where(values <= noise, 0.0, values), torch.nan)


def _factorised(matrices: Tensor) -> Tensor:
    try:
        values: Tensor = torch.linalg.svdvals(matrices)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence; torch documents this class
        if len(matrices) > 1:
            return torch.cat([_factorised(matrix) for matrix in matrices.split(1)])
        values = matrices.new_full((1, min(matrices.shape[1:])), torch.nan)
    return values


def rank_tolerance(weight: Tensor) -> float:
    r"""Return :math:`\max(m, n)\, \epsilon` for the dtype of `weight`, the relative rounding error of its singular values.

    Examples
    --------
    >>> rank_tolerance(torch.ones(2, 1024)) == 1024 * 2.0**-23
    True
    """
    wide = weight.dtype if weight.is_floating_point() else torch.float32
    rows = weight.shape[0] if weight.ndim else 1
    return max(rows, weight.numel() // max(rows, 1), 1) * torch.finfo(wide).eps


def _scaled(sigma: Tensor) -> Tensor:
    """Return `sigma` divided by its largest value; NaN for an empty or zero spectrum, or one with a NaN."""
    if not sigma.numel():
        return torch.full((1,), torch.nan, dtype=torch.float64, device="cpu")
    largest = sigma.amax()
    return sigma / torch.where(largest > 0, largest, torch.nan)


def condition_number(sigma: Tensor) -> Tensor:
    r"""Return :math:`\kappa = \sigma_1 / \sigma_{\min}`, at least 1.

    A growing value means that the weight loses directions.  1e3 is common; at 1e6 the smallest directions are rounding
    errors in half precision.

    Parameters
    ----------
    sigma : Tensor
        ``(n,)``, from :func:`singular_values`.

    Returns
    -------
    Tensor
        0-d, dimensionless.  Infinite if a value is 0; NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> condition_number(torch.tensor([4.0, 2.0, 1.0])).item()
    4.0
    """
    return 1.0 / _scaled(sigma).amin()


def numerical_rank(sigma: Tensor, tolerance: float = 0.0) -> Tensor:
    r"""Return the number of :math:`\sigma_i >` `tolerance` :math:`\cdot\, \sigma_1`.

    With :func:`rank_tolerance` it equals the rank computed by numpy.  0 for the zero matrix; NaN for a NaN or without
    values.

    Examples
    --------
    >>> numerical_rank(torch.tensor([4.0, 2.0, 1e-9]), tolerance=1e-6).item()
    2.0
    """
    if not sigma.numel():
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    largest = sigma.amax()
    return torch.where(largest.isnan(), torch.nan, (sigma > tolerance * largest).sum().double())


def stable_rank(sigma: Tensor) -> Tensor:
    r"""Return :math:`\sum \lambda / \lambda_1 = \|W\|_F^2 / \sigma_1^2`, between 1 and the rank.

    This is the stable rank of Rudelson and Vershynin (2007).

    NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> round(stable_rank(torch.tensor([3.0, 1.0])).item(), 3)
    1.111
    """
    return _scaled(sigma).square().sum()


def participation_ratio(sigma: Tensor) -> Tensor:
    r"""Return :math:`(\sum \lambda)^2 / \sum \lambda^2`, between 1 and the rank.

    It is the number of directions that hold the variance.

    A fall towards 1 for activations is a collapse of the representation.  NaN for the zero matrix, without values, and
    for a NaN.

    Examples
    --------
    >>> round(participation_ratio(torch.tensor([3.0, 1.0])).item(), 3)
    1.22
    """
    eigenvalues = _scaled(sigma).square()
    return eigenvalues.sum().square() / eigenvalues.square().sum()


def effective_rank(sigma: Tensor) -> Tensor:
    r"""Return the effective rank :math:`\exp(-\sum q \ln q)` of Roy and Vetterli (2007), between 1 and the rank.

    NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> round(effective_rank(torch.tensor([3.0, 1.0])).item(), 3)
    1.755
    """
    return _exponential_entropy(_scaled(sigma))


def entropy_rank(sigma: Tensor) -> Tensor:
    r"""Return :math:`\exp(-\sum p \ln p)`, between 1 and the rank: the effective rank over :math:`\lambda = \sigma^2`.

    NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> round(entropy_rank(torch.tensor([3.0, 1.0])).item(), 3)
    1.384
    """
    return _exponential_entropy(_scaled(sigma).square())


def _exponential_entropy(weights: Tensor) -> Tensor:
    shares = weights / weights.sum()
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


class PowerLaw(NamedTuple):
    r"""A power law :math:`\lambda^{-\alpha}` fitted to the tail of a spectrum; NaN and ``n_tail = 0`` if none fits."""

    alpha: float
    ks_distance: float
    x_min: float
    n_tail: int


def power_law_alpha(eigenvalues: Tensor, compat: str | None = None) -> PowerLaw:
    r"""Fit a power law to the largest eigenvalues :math:`\lambda = \sigma^2` of a weight.

    For every candidate :math:`x_\min` among the values the maximum-likelihood exponent is
    :math:`\alpha = 1 + n / \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)`.
    The result is the candidate with the smallest Kolmogorov-Smirnov distance to the data.

    Parameters
    ----------
    eigenvalues : Tensor
        ``(n,)``, in any order; eigenvalues that are not positive and finite are left out.
    compat : {None, 'weightwatcher'}
        By default the distance is that of Kolmogorov and Smirnov, taken on both sides of each step of the empirical
        distribution function.  ``'weightwatcher'`` takes it before each step only, as that library does, and therefore
        chooses another tail for some matrices.

    Returns
    -------
    alpha : float
        Dimensionless, above 1; its standard error is :math:`(\alpha - 1) / \sqrt{n_{tail}}`.  Trained layers have 2 to
        6, random layers more.
    ks_distance : float
        In [0, 1].  Above about 0.1 the tail does not follow a power law, and `alpha` has no meaning.
    x_min : float
        The start of the tail, in units of the eigenvalues.
    n_tail : int
        The number of eigenvalues in the tail.

        The result is NaN, NaN, NaN, 0 for fewer than two distinct values.

    Notes
    -----
    The time grows as :math:`n^2`: 0.2 s for 2,000 values, on the host.

    References
    ----------
    A. Clauset, C. Shalizi and M. Newman, Power-law distributions in empirical data, 2009.
    C. Martin and M. Mahoney, Implicit self-regularization in deep neural networks, 2021.

    Examples
    --------
    >>> quantiles = (torch.arange(200.0).double() + 0.5) / 200
    >>> fit = power_law_alpha((1 - quantiles) ** (-1 / 1.5))      # a Pareto distribution with alpha = 2.5
    >>> round(fit.alpha, 1), fit.ks_distance < 0.02
    (2.5, True)
    """
    if compat not in (None, "weightwatcher"):
        raise ConfigError(f"power_law_alpha needs compat None or 'weightwatcher', got {compat!r}")
    values = as_float64(eigenvalues).cpu().numpy().ravel()
    values = np.sort(values[np.isfinite(values) & (values > 0)])
    if len(np.unique(values)) < 2:
        return PowerLaw(math.nan, math.nan, math.nan, 0)
    logs = np.log(values)
    starts = np.flatnonzero(np.r_[True, np.diff(values) > 0])[:-1]  # the largest value alone is not a tail
    tails = len(values) - starts
    alphas = 1 + tails / (np.cumsum(logs[::-1])[::-1][starts] - tails * logs[starts])
    distances = [_distance(logs[s:], a, compat is None) for s, a in zip(starts, alphas, strict=True)]
    best = int(np.argmin(distances))
    return PowerLaw(float(alphas[best]), float(distances[best]), float(values[starts[best]]), int(tails[best]))


def _distance(logs: NDArray[np.float64], alpha: float, both_sides: bool) -> float:
    """Return the largest distance between the power law from ``logs[0]`` on and the empirical distribution function."""
    n = len(logs)
    law = -np.expm1((1 - alpha) * (logs - logs[0]))
    steps = np.arange(n + 1) / n
    if both_sides:
        return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))
    return float(np.abs(law - steps[:-1]).max())
