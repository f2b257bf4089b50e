r"""The number of directions that the outputs of a layer use, computed from their covariance.

The saturation of an activation function is something else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import as_float64
from ikkuna.numerics.representation.cka import centred

__all__ = ["Scatter", "intrinsic_dimension", "layer_saturation"]


@dataclass(frozen=True, eq=False)
class Scatter:
    r"""Number of rows, mean, and :math:`M_2 = \sum (x - \bar x)(x - \bar x)^\top`, which merge to a covariance.

    Parameters
    ----------
    n : int
        The number of rows.
    mean : Tensor
        ``(features,)``, float64.
    m2 : Tensor
        ``(features, features)``, float64.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0], [4.0]])
    >>> (Scatter.of(x[:2]) + Scatter.of(x[2:])).covariance().item() == Scatter.of(x).covariance().item() == 8 / 3
    True
    """

    n: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Scatter":
        """Return the scatter of ``(rows, features)``, which costs :math:`2 n d^2` operations and two float64 copies."""
        deviations = centred(rows)
        mean = as_float64(rows).mean(0) if len(rows) else deviations.new_zeros(deviations.shape[1])
        return cls(len(rows), mean, deviations.mT @ deviations)

    def __add__(self, other: "Scatter") -> "Scatter":
        """Return the scatter of both sets of rows (Chan, Golub and LeVeque 1979)."""
        if not self.n or not other.n:
            return self if self.n else other
        n, d = self.n + other.n, other.mean - self.mean
        m2 = self.m2 + other.m2 + torch.outer(d, d) * (self.n * other.n / n)
        return Scatter(n, self.mean + d * (other.n / n), m2)

    def covariance(self) -> Tensor:
        """Return the population covariance ``(features, features)``; NaN without rows."""
        return self.m2 / self.n if self.n else torch.full_like(self.m2, torch.nan)


def intrinsic_dimension(covariance: Tensor, threshold: float = 0.99, compat: str | None = None) -> float:
    r"""Return the smallest k for which the k largest eigenvalues hold a share `threshold` of the variance.

    Parameters
    ----------
    covariance : Tensor
        ``(features, features)``, symmetric.
    threshold : float
        In (0, 1].
    compat : {None, 'delve'}
        By default the definition.  ``'delve'`` counts as that library does: the eigenvalues whose cumulative share is
        below the threshold, which is usually one less and can be 0.

    Returns
    -------
    float
        Between 1 (``'delve'``: 0) and the rank, which is at most the number of rows minus one.
        NaN without variance, without features, and if an element is not finite.

    References
    ----------
    M. Richter et al., Feature space saturation during training, 2021.

    Examples
    --------
    >>> intrinsic_dimension(torch.diag(torch.tensor([98.0, 1.5, 0.5])))
    2.0
    >>> intrinsic_dimension(torch.diag(torch.tensor([98.0, 1.5, 0.5])), compat="delve")
    1.0
    """
    if compat not in (None, "delve") or not 0 < threshold <= 1:
        raise ConfigError(
            f"intrinsic_dimension needs a threshold in (0, 1] and compat None or 'delve', got {threshold!r}, {compat!r}"
        )
    c = as_float64(covariance)
    # Both triangles are checked, because the factorisation reads only one of them.
    if not c.numel() or not c.isfinite().all():
        return float("nan")
    eigenvalues = torch.linalg.eigvalsh(c).flip(0).clamp(min=0.0)
    total = eigenvalues.sum()
    if not total > 0:
        return float("nan")
    shares = eigenvalues.cumsum(0) / total
    if compat == "delve":
        return float((shares < threshold).sum())
    # A rounding error of the sum must not add a direction.
    return float((shares < threshold * (1 - 1e-12)).sum() + 1)


def layer_saturation(covariance: Tensor, threshold: float = 0.99, compat: str | None = None) -> float:
    r"""Return :func:`intrinsic_dimension` over the number of features, in (0, 1] or NaN.

    Low saturation of layers at the end of a network is unused capacity.

    Examples
    --------
    >>> layer_saturation(torch.eye(4))
    1.0
    >>> layer_saturation(torch.diag(torch.tensor([1.0, 0.0, 0.0, 0.0])))
    0.25
    """
    features = covariance.shape[0]
    return intrinsic_dimension(covariance, threshold, compat) / features if features else float("nan")
