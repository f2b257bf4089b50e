r"""Similarity of two representations of the same inputs: canonical correlations, SVCCA and PWCCA.

A representation is a matrix ``(rows, features)``; rows with the same index belong to the same input.
Everything is computed in float64 from orthonormal bases and waits for the device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import as_float64
from ikkuna.numerics.representation.cka import centred

__all__ = [
    "SVCCA",
    "Chance",
    "canonical_correlations",
    "chance_level",
    "principal_basis",
    "pwcca",
    "svcca",
    "svcca_of_bases",
]


class _Basis(NamedTuple):
    """An orthonormal basis of the columns of a representation, with its singular values."""

    rows: Tensor
    values: Tensor


def _basis(x: Tensor, variance: float = 1.0) -> _Basis:
    """Return the leading directions of `x` that hold a share `variance` of it, without rounding errors."""
    none = _Basis(x.new_zeros(x.shape[0], 0), x.new_zeros(0))
    if not x.numel() or not x.isfinite().all():
        return none
    rows, values, _ = torch.linalg.svd(x, full_matrices=False)
    held = values > values[0] * max(x.shape) * torch.finfo(x.dtype).eps
    rank = int(held.sum())
    if not rank or not values[0] > 0:
        return none
    if variance < 1:
        shares = values[:rank].square().cumsum(0)
        rank = min(rank, int((shares < variance * shares[-1]).sum()) + 1)
    return _Basis(rows[:, :rank], values[:rank])


def canonical_correlations(x: Tensor, y: Tensor, center: bool = True) -> Tensor:
    r"""Return the canonical correlations :math:`\rho_1 \ge \rho_2 \ge \dots` of two representations.

    They are the singular values of :math:`Q_x^\top Q_y`, with orthonormal bases Q of both column spaces.  The bases
    come from an SVD, so duplicate and constant columns have no effect, and no covariance is inverted.
    Compare the mean of the correlations with :func:`chance_level`.

    Parameters
    ----------
    x, y : Tensor
        ``(n, p)`` and ``(n, q)``, of the same inputs.
    center : bool
        Whether column means are subtracted first, as the definition of a correlation requires.

    Returns
    -------
    Tensor
        ``(min(rank x, rank y),)``, float64, in [0, 1]; invariant under invertible linear maps of either
        representation.  Empty if one is constant or not finite.

    Notes
    -----
    About :math:`6 n (p^2 + q^2)` operations.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> canonical_correlations(x, x @ torch.tensor([[2.0, 1.0], [0.0, 3.0]])).round(decimals=6)
    tensor([1., 1.], dtype=torch.float64)
    """
    _check_rows(x, y)
    x, y = (centred(x), centred(y)) if center else (as_float64(x), as_float64(y))
    return _correlations(_basis(x).rows, _basis(y).rows)


def _check_rows(x: Tensor, y: Tensor) -> None:
    if x.shape[0] != y.shape[0]:
        raise ConfigError(f"representations need equal numbers of rows, got {len(x)} and {len(y)}")


def _correlations(left: Tensor, right: Tensor) -> Tensor:
    if not left.shape[1] or not right.shape[1]:
        return left.new_zeros(0)
    values: Tensor = torch.linalg.svdvals(left.mT @ right)
    return values.clamp(max=1.0)


class SVCCA(NamedTuple):
    """The mean correlation, the numbers of directions, and the mean correlation of independent data."""

    mean: float
    directions_x: int
    directions_y: int
    chance: float


def svcca(x: Tensor, y: Tensor, variance: float = 0.99) -> SVCCA:
    r"""Compare two representations by the mean canonical correlation of their leading principal directions.

    Of each representation, the fewest directions are kept whose :math:`\sum_{i \le k} s_i^2` is at least a share
    `variance` of the total.  The mean is over the smaller number of directions.

    Parameters
    ----------
    x, y : Tensor
        ``(n, p)`` and ``(n, q)``, of the same inputs.  Use at least ten rows for each feature: independent data with
        ``n = 2 p`` have a mean correlation of 0.64, and all correlations are 1 with fewer rows than features.
    variance : float
        The share of the variance to keep, in (0, 1].

    Returns
    -------
    mean : float
        In [0, 1]; NaN if a representation is constant or not finite.
    directions_x, directions_y : int
        The numbers of directions.
    chance : float
        The value of `mean` for independent data, from :func:`chance_level`.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.01], [0.0, -0.01]])      # 99.99 % along one direction
    >>> svcca(x, -3 * x).directions_x, round(svcca(x, -3 * x).mean, 6)
    (1, 1.0)
    """
    _check_rows(x, y)
    return svcca_of_bases(principal_basis(x, variance), principal_basis(y, variance))


def principal_basis(x: Tensor, variance: float = 0.99) -> Tensor:
    r"""Return an orthonormal basis of the fewest principal directions of `x` that hold a share `variance` of its variance.

    Parameters
    ----------
    x : Tensor
        ``(n, p)``; columns are centred.
    variance : float
        The share of the variance to keep, in (0, 1].

    Returns
    -------
    Tensor
        ``(n, directions)``, float64, without unit; zero directions if `x` is constant or not finite.

    Notes
    -----
    About :math:`6 n p^2` operations.

    Examples
    --------
    >>> principal_basis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.01], [0.0, -0.01]])).shape
    torch.Size([4, 1])
    """
    if not 0 < variance <= 1:
        raise ConfigError(f"svcca needs a variance in (0, 1], got {variance!r}")
    return _basis(centred(x), variance).rows


def svcca_of_bases(left: Tensor, right: Tensor) -> SVCCA:
    """Return the result of :func:`svcca` for two results of :func:`principal_basis`.

    Examples
    --------
    >>> basis = principal_basis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> round(svcca_of_bases(basis, basis).mean, 6)
    1.0
    """
    _check_rows(left, right)
    correlations = _correlations(left, right)
    mean = correlations.mean().item() if len(correlations) else math.nan
    chance = chance_level(left.shape[1], right.shape[1], left.shape[0]).mean
    return SVCCA(mean, left.shape[1], right.shape[1], chance)


def pwcca(x: Tensor, y: Tensor) -> float:
    r"""Return the mean canonical correlation, weighted by the share of `x` that each direction explains.

    It is :math:`\sum_i a_i \rho_i / \sum_i a_i` with the canonical variates :math:`h_i` of x and
    :math:`a_i = \sum_j |\langle h_i, x_j \rangle|` over the centred columns of x.  It is not symmetric.

    Parameters
    ----------
    x, y : Tensor
        ``(n, p)`` and ``(n, q)``, of the same inputs; `x` is the one with fewer features.

    Returns
    -------
    float
        In [0, 1]; NaN if a representation is constant or not finite.

    References
    ----------
    A. Morcos, M. Raghu and S. Bengio, Insights on representational similarity in neural networks with CCA, 2018.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(pwcca(x, 2 * x), 6)
    1.0
    """
    _check_rows(x, y)
    columns = centred(x)
    left, right = _basis(columns).rows, _basis(centred(y)).rows
    if not left.shape[1] or not right.shape[1]:
        return math.nan
    turn, correlations, _ = torch.linalg.svd(left.mT @ right, full_matrices=False)
    weights = ((left @ turn).mT @ columns).abs().sum(1)
    return float((weights @ correlations.clamp(max=1.0) / weights.sum()).item())


class Chance(NamedTuple):
    """The canonical correlations of independent data: their mean, mean square and maximum."""

    mean: float
    mean_square: float
    largest: float


def chance_level(p: int, q: int, n: int) -> Chance:
    r"""Return the canonical correlations that `n` rows of `p` and `q` independent features show by chance.

    The mean of :math:`\rho^2` is :math:`\max(p, q) / (n - 1)`.  With :math:`a = \min(p, q) / (n - 1)` and
    :math:`b = \max(p, q) / (n - 1)`, :math:`\lambda = \rho^2` follows, for large n, the law of Wachter (1980) on
    :math:`\lambda_\pm = (\sqrt{a (1 - b)} \pm \sqrt{b (1 - a)})^2`, with the density
    :math:`\sqrt{(\lambda_+ - \lambda)(\lambda - \lambda_-)} / 2 \pi a \lambda (1 - \lambda)`.

    Parameters
    ----------
    p, q : int
        The numbers of directions.
    n : int
        The number of rows.

    Returns
    -------
    Chance
        In [0, 1]; all are 1 if :math:`n - 1 \le \max(p, q)`, and NaN without directions.

    Examples
    --------
    >>> tuple(round(v, 4) for v in chance_level(500, 500, 10_000))
    (0.1908, 0.05, 0.4359)
    """
    if min(p, q) < 1 or n < 2:
        return Chance(math.nan, math.nan, math.nan)
    a, b = min(p, q) / (n - 1), max(p, q) / (n - 1)
    if b >= 1:
        return Chance(1.0, 1.0, 1.0)
    low, high = ((math.sqrt(a * (1 - b)) + s * math.sqrt(b * (1 - a))) ** 2 for s in (-1, 1))
    certain = max(0.0, (a + b - 1) / a)  # this share of the correlations is exactly 1
    angle = (torch.arange(20_000, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / 20_000)
    half, value = (high - low) / 2, (high + low) / 2 + (high - low) / 2 * angle.cos()
    density = (half * angle.sin()) ** 2 / (value * (1 - value))
    mean = (density * value.sqrt()).sum() / density.sum()
    return Chance(certain + (1 - certain) * mean.item(), b, 1.0 if certain else math.sqrt(high))
