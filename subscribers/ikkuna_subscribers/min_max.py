"""The range of a tensor."""

from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna_subscribers._helpers.naming import name_results

__all__ = ["MinMaxSubscriber"]


class MinMaxSubscriber(PlotSubscriber):
    r"""The smallest and the largest element of a tensor, :math:`\min_i x_i` and :math:`\max_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_min`` and ``{kind}_max``, in the unit of x.
    Over several calls and micro-batches they are those of all elements together.
    Infinities are elements like others; data with a NaN has extrema NaN; an empty tensor publishes nothing.

    Look for: a maximum that leaves the rest behind, which is one outlier and hides in a norm; rectified outputs with maximum 0.

    Parameters
    ----------
    kind : str
        What to look at.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> MinMaxSubscriber("weights").publishes
    ('weights_min', 'weights_max')
    """

    fields = ("min", "max")
    derived = True

    def __init__(self, kind: str, **options: Any) -> None:
        name_results(options, f"{kind}_min", f"{kind}_max")
        super().__init__(kind, **options)

    def compute(self, message: ModuleMessage) -> None:
        """Emit both."""
        record = message.record
        assert record is not None
        assert record.min is not None
        assert record.max is not None
        for kind, value in zip(self.publishes, (record.min, record.max), strict=True):
            self.emit(message, value, kind)
