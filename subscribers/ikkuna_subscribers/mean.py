"""The mean of a tensor."""

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["MeanSubscriber"]


class MeanSubscriber(SharedStatisticSubscriber):
    r"""The arithmetic mean of all elements of a tensor, :math:`\frac 1 n \sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_mean``, in the unit of x.
    Over several calls and micro-batches it is the mean of all elements together; a loss is weighted by its number of labels.
    An empty tensor publishes nothing; data with a NaN or Inf has mean NaN, unless `finite_only` is set.

    Look for: activations whose mean moves away from 0 from layer to layer.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> MeanSubscriber("activations").publishes
    ('activations_mean',)
    """

    fields = ("mean",)
    accepts_finite_only = True
    results = ("mean",)
    derived = True

    def values(self, record: Record) -> tuple[float]:
        """Return the mean."""
        return (record.mean,)
