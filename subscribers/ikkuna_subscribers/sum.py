"""The sum of a tensor."""

from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["SumSubscriber"]


class SumSubscriber(PlotSubscriber):
    r"""The sum of all elements of a tensor, :math:`\sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_sum``, in the unit of x.
    Over several calls and micro-batches it is the sum over all of them; of a loss it is the weighted mean.
    An empty tensor publishes nothing; data with a NaN or Inf has sum NaN, unless `finite_only`.

    Look for: what should cancel and does not, such as the gradient of the logits of a softmax.

    Parameters
    ----------
    kind : str
        What to look at.
    finite_only : bool
        Leave out elements that are NaN or infinite.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> SumSubscriber("layer_gradients").publishes
    ('layer_gradients_sum',)
    """

    fields = ("mean",)
    derived = True

    def __init__(self, kind: str, *, finite_only: bool = False, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_sum")
        super().__init__(kind, **options)
        self.finite_only = finite_only

    def compute(self, message: ModuleMessage) -> None:
        """Emit the sum."""
        record = message.record
        assert record is not None
        self.emit(message, record.mean * record.count)
