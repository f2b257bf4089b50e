"""The smallest and the largest element of a tensor."""

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["MinMaxSubscriber"]


class MinMaxSubscriber(SharedStatisticSubscriber):
    r"""The smallest and the largest element of a tensor, :math:`\min_i x_i` and :math:`\max_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_min`` and ``{kind}_max``, in the unit of x.
    Over several calls and micro-batches they are the extrema of all elements together.
    Infinite elements count; the extrema of data with a NaN are NaN; an empty tensor publishes nothing.

    Look for: a maximum that grows much faster than the norm, which is one outlier; rectified outputs with maximum 0.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> MinMaxSubscriber("weights").publishes
    ('weights_min', 'weights_max')
    """

    fields = ("min", "max")
    results = ("min", "max")
    derived = True

    def values(self, record: Record) -> tuple[float | None, float | None]:
        """Return both extrema."""
        return record.min, record.max
