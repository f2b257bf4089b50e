"""How heavy the tail of a weight's spectrum is."""

from typing import Any

from torch import Tensor

from ikkuna.numerics.spectrum import power_law_alpha
from ikkuna_subscribers._helpers.spectrum import SpectrumSubscriber

__all__ = ["AlphaSubscriber"]


class AlphaSubscriber(SpectrumSubscriber):
    r"""The exponent of a power law :math:`\lambda^{-\alpha}` fitted to the largest eigenvalues :math:`\lambda = \sigma^2` of a weight.

    It is that of greatest likelihood, :math:`\alpha = 1 + n / \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)`, for the start
    :math:`x_\min` of the tail that brings the law closest to the data, by the distance D of Kolmogorov and Smirnov.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_alpha``, without unit, above 1,
    and ``{kind}_tail_distance``, D, between 0 and 1: above about 0.1 the tail is no power law, and the exponent no number to read.
    Both are NaN with fewer than two distinct eigenvalues and for a matrix with a NaN or Inf; below some fifty they say little.
    An empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), which waits for a device, and a search on the host.

    Look for: between 2 and 6 in layers that have learned; above, a layer is close to random; below 2 it has learned by heart.

    Parameters
    ----------
    kind : str
        What to look at.
    subsample : int
        Decompose at every so-many-th step; once an epoch is enough.
    **options
        See `Subscriber`.

    References
    ----------
    A. Clauset, C. Shalizi and M. Newman, Power-law distributions in empirical data, 2009.
    C. Martin and M. Mahoney, Implicit self-regularization in deep neural networks, 2021.

    Examples
    --------
    >>> AlphaSubscriber().publishes
    ('weights_alpha', 'weights_tail_distance')
    """

    def __init__(self, kind: str = "weights", *, subsample: int = 100, **options: Any) -> None:
        super().__init__(kind, "alpha", "tail_distance", subsample=subsample, **options)

    def results(self, values: Tensor) -> tuple[float, ...]:
        """Return the exponent and its distance."""
        fit = power_law_alpha(values.square())
        return fit.alpha, fit.ks_distance
