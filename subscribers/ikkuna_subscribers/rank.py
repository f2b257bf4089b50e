"""Ranks of a matrix that are real numbers."""

from torch import Tensor

from ikkuna.numerics.spectrum import effective_rank, participation_ratio, stable_rank
from ikkuna_subscribers._helpers.spectrum_subscriber import SpectrumSubscriber

__all__ = ["RankSubscriber"]


class RankSubscriber(SpectrumSubscriber):
    r"""Three measures of the number of directions that a matrix uses.

    With the singular values :math:`\sigma_1 \ge \sigma_2 \ge \dots`, :math:`\lambda = \sigma^2` and :math:`q = \sigma / \sum \sigma`
    they are the stable rank :math:`\sum \lambda / \lambda_1`, the participation ratio :math:`(\sum \lambda)^2 / \sum \lambda^2`,
    and the effective rank :math:`\exp(-\sum q \ln q)`.  They increase in this order and lie between 1 and the rank.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_stable_rank``, ``{kind}_participation_ratio``
    and ``{kind}_effective_rank``, numbers of directions.
    If a step has several calls, the last one counts.  The first axis of activations is the sample, so the batch size bounds every rank.
    They are NaN for a matrix of zeros or one with a NaN or Inf; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: activations whose ranks fall towards 1, a collapse of the representation; the ranks of weights usually fall late in training.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    References
    ----------
    O. Roy and M. Vetterli, The effective rank: a measure of effective dimensionality, 2007.
    M. Rudelson and R. Vershynin, Sampling from large matrices, 2007.

    Examples
    --------
    >>> RankSubscriber().publishes
    ('weights_stable_rank', 'weights_participation_ratio', 'weights_effective_rank')
    """

    results = ("stable_rank", "participation_ratio", "effective_rank")

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the three ranks."""
        return stable_rank(sigma).item(), participation_ratio(sigma).item(), effective_rank(sigma).item()
