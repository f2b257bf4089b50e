"""The power-law exponent of the spectrum of a weight."""

from typing import Any

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.spectrum import power_law_alpha
from ikkuna_subscribers._helpers.spectrum_subscriber import SpectrumSubscriber

__all__ = ["AlphaSubscriber"]


class AlphaSubscriber(SpectrumSubscriber):
    r"""The exponent of a power law :math:`\lambda^{-\alpha}` that describes the largest eigenvalues of a weight.

    The eigenvalues are :math:`\lambda = \sigma^2`, with the singular values :math:`\sigma`.

    The exponent is the maximum-likelihood estimate :math:`\alpha = 1 + n / \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)`.
    The start :math:`x_\min` of the tail is the one with the smallest Kolmogorov-Smirnov distance D between the law and the data.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_alpha``, without unit, above 1,
    and ``{kind}_tail_distance``, D, between 0 and 1: above about 0.1 the tail does not follow a power law, and the exponent has no meaning.
    Both are NaN with fewer than two distinct eigenvalues and for a matrix with a NaN or Inf.
    With fewer than about fifty eigenvalues both are unreliable; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: values between 2 and 6 in layers that have learned; above 6 a layer is close to random; below 2 it overfits.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next; once an epoch is enough.
    compat : {None, 'weightwatcher'}
        ``'weightwatcher'`` takes D before each step of the data only, as that library does; see
        `ikkuna.numerics.spectrum.power_law_alpha`.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `compat` is unknown.

    References
    ----------
    A. Clauset, C. Shalizi and M. Newman, Power-law distributions in empirical data, 2009.
    C. Martin and M. Mahoney, Implicit self-regularization in deep neural networks, 2021.

    Examples
    --------
    >>> AlphaSubscriber().publishes
    ('weights_alpha', 'weights_tail_distance')
    """

    results = ("alpha", "tail_distance")

    def __init__(self, kind: str = "weights", *, compat: str | None = None, **options: Any) -> None:
        if compat not in (None, "weightwatcher"):
            raise ConfigError(f"AlphaSubscriber needs compat None or 'weightwatcher', got {compat!r}")
        super().__init__(kind, **options)
        self.compat = compat

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the exponent and its distance."""
        fit = power_law_alpha(sigma.square(), self.compat)
        return fit.alpha, fit.ks_distance
