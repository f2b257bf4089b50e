"""The sum of a tensor."""

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["SumSubscriber"]


class SumSubscriber(SharedStatisticSubscriber):
    r"""The sum of all elements of a tensor, :math:`\sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_sum``, in the unit of x.
    Over several calls and micro-batches it is the sum over all of them; for a loss it is the weighted mean.
    An empty tensor publishes nothing; data with a NaN or Inf has sum NaN, unless `finite_only` is set.

    Look for: sums that should be 0 and are not, such as that of the gradient of a softmax's logits.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> SumSubscriber("layer_gradients").publishes
    ('layer_gradients_sum',)
    """

    fields = ("mean",)
    accepts_finite_only = True
    results = ("sum",)
    derived = True

    def values(self, record: Record) -> tuple[float]:
        """Return the sum."""
        return (record.mean * record.count,)
