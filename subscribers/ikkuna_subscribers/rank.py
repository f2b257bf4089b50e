"""How many directions of a matrix are in use."""

from typing import Any

from torch import Tensor

from ikkuna.numerics.spectrum import effective_rank, participation_ratio, stable_rank
from ikkuna_subscribers._helpers.spectrum import SpectrumSubscriber

__all__ = ["RankSubscriber"]


class RankSubscriber(SpectrumSubscriber):
    r"""Three measures of how many directions a matrix uses, from its singular values :math:`\sigma_1 \ge \sigma_2 \ge \dots`.

    With :math:`\lambda = \sigma^2` and :math:`q = \sigma / \sum \sigma`:
    the stable rank :math:`\sum \lambda / \lambda_1`, the participation ratio :math:`(\sum \lambda)^2 / \sum \lambda^2`,
    and the effective rank :math:`\exp(-\sum q \ln q)`, in this order from 1 to the rank.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_stable_rank``, ``{kind}_participation_ratio``
    and ``{kind}_effective_rank``, numbers of directions.
    Of several calls in a step the last counts, and of activations the first axis is the sample: a batch bounds every rank by its size.
    They are NaN for a matrix of zeros or one with a NaN or Inf; an empty one publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), which waits for a device.

    Look for: activations that fall towards 1, a collapse of the representation; weights lose rank late in training as a rule.

    Parameters
    ----------
    kind : str
        What to look at.
    subsample : int
        Decompose at every so-many-th step.
    **options
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

    def __init__(self, kind: str = "weights", *, subsample: int = 100, **options: Any) -> None:
        names = ("stable_rank", "participation_ratio", "effective_rank")
        super().__init__(kind, *names, subsample=subsample, **options)

    def results(self, values: Tensor) -> tuple[float, ...]:
        """Return the three ranks."""
        return stable_rank(values).item(), participation_ratio(values).item(), effective_rank(values).item()
