"""The condition number of a weight."""

from torch import Tensor

from ikkuna.numerics.spectrum import condition_number
from ikkuna_subscribers._helpers.spectrum_subscriber import SpectrumSubscriber

__all__ = ["ConditionNumberSubscriber"]


class ConditionNumberSubscriber(SpectrumSubscriber):
    r"""The largest over the smallest singular value of a weight, :math:`\kappa = \sigma_1 / \sigma_{\min}`.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_condition_number``, without unit, at least 1.
    It is infinite if a singular value is 0, and NaN for a matrix of zeros or one with a NaN or Inf; an empty matrix publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), on an accelerator beside training.

    Look for: growth; 1e3 is common, and at 1e6 the smallest singular value is below the rounding error of half precision.

    Parameters
    ----------
    kind : str
        The kind to measure.
    subsample : int
        The number of steps from one decomposition to the next.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ConditionNumberSubscriber().publishes
    ('weights_condition_number',)
    """

    results = ("condition_number",)

    def values(self, sigma: Tensor) -> tuple[float, ...]:
        """Return the condition number."""
        return (condition_number(sigma).item(),)
