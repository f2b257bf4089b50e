"""The variance of a tensor."""

from typing import Any

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["VarianceSubscriber"]


class VarianceSubscriber(SharedStatisticSubscriber):
    r"""The variance of all elements of a tensor, :math:`\frac{1}{n - c} \sum_i (x_i - \bar x)^2` with correction c.

    Takes any kind with a tensor; publishes ``{kind}_variance``, in the squared unit of x.
    Over several calls and micro-batches it is the variance of all elements together, merged without cancellation.
    With n ≤ c it is NaN; data with a NaN or Inf has variance NaN, unless `finite_only` is set.

    Look for: activations whose variance grows or vanishes with depth, which indicates a poor initialisation.

    Parameters
    ----------
    kind : str
        The kind to measure.
    correction : int
        0 for the variance of these elements, 1 for Bessel's estimate of the variance of a population.
    **options : Any
        See `SharedStatisticSubscriber`.

    Raises
    ------
    ConfigError
        If `correction` is not an integer of at least 0.

    Examples
    --------
    >>> VarianceSubscriber("weights").publishes
    ('weights_variance',)
    """

    fields = ("m2", "sumsq")  # with the sum of squares the second moment costs little where the mean is small
    accepts_finite_only = True
    results = ("variance",)

    def __init__(self, kind: str, *, correction: int = 0, **options: Any) -> None:
        require_integers("VarianceSubscriber", 0, correction=correction)
        super().__init__(kind, **options)
        self.correction = correction

    def values(self, record: Record) -> tuple[float]:
        """Return the variance."""
        return (record.variance(self.correction),)
