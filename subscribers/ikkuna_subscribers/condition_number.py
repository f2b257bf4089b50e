"""How unevenly a weight stretches its input."""

from typing import Any

from torch import Tensor

from ikkuna.numerics.spectrum import condition_number
from ikkuna_subscribers._helpers.spectrum import SpectrumSubscriber

__all__ = ["ConditionNumberSubscriber"]


class ConditionNumberSubscriber(SpectrumSubscriber):
    r"""The largest over the smallest singular value of a weight, :math:`\kappa = \sigma_1 / \sigma_{\min}`.

    Takes any kind with a tensor, read as a matrix ``(out, in * ...)``; publishes ``{kind}_condition_number``, without unit, at least 1.
    It is infinite if a singular value is 0, and NaN for a matrix of zeros or one with a NaN or Inf; an empty one publishes nothing.
    Every publication costs a decomposition in float64 (half a second for 1024 x 1024), which waits for a device.

    Look for: growth; 1e3 is common, and at 1e6 the least direction is below the rounding of half precision.

    Parameters
    ----------
    kind : str
        What to look at.
    subsample : int
        Decompose at every so-many-th step.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> ConditionNumberSubscriber().publishes
    ('weights_condition_number',)
    """

    def __init__(self, kind: str = "weights", *, subsample: int = 100, **options: Any) -> None:
        super().__init__(kind, "condition_number", subsample=subsample, **options)

    def results(self, values: Tensor) -> tuple[float, ...]:
        """Return the condition number."""
        return (condition_number(values).item(),)
