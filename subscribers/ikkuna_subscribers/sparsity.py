"""The share of zeros in a tensor."""

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["SparsitySubscriber"]


class SparsitySubscriber(SharedStatisticSubscriber):
    r"""The share of elements equal to zero, :math:`\#\{i : x_i = 0\} / n`.

    Takes any kind with a tensor; publishes ``{kind}_sparsity``, between 0 and 1.
    Over several calls and micro-batches it is the share of all elements together.
    Negative zero counts, NaN does not; zeros that a sparse tensor does not store count; an empty tensor publishes nothing.

    Look for: values between 0.5 and 0.9 are usual for rectified activations, a layer near 1 is dying;
    a gradient that is zero everywhere belongs to a layer that is frozen or dead, or whose gradient underflows.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> SparsitySubscriber("activations", modules="*relu*").publishes
    ('activations_sparsity',)
    """

    fields = ("zeros",)
    results = ("sparsity",)

    def values(self, record: Record) -> tuple[float]:
        """Return the share."""
        return (record.sparsity,)
