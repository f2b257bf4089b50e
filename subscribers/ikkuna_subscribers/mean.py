"""The mean of a tensor."""

from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["MeanSubscriber"]


class MeanSubscriber(PlotSubscriber):
    r"""The arithmetic mean of all elements of a tensor, :math:`\frac 1 n \sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_mean``, in the unit of x.
    Over several calls and micro-batches it is the mean of all elements together; a loss is weighted by its number of labels.
    An empty tensor has no mean and publishes nothing; data with a NaN or Inf has mean NaN, unless `finite_only`.

    Look for: activations that drift away from 0 layer by layer.

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
    >>> MeanSubscriber("activations").publishes
    ('activations_mean',)
    """

    fields = ("mean",)
    derived = True

    def __init__(self, kind: str, *, finite_only: bool = False, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_mean")
        super().__init__(kind, **options)
        self.finite_only = finite_only

    def compute(self, message: ModuleMessage) -> None:
        """Emit the mean."""
        assert message.record is not None
        self.emit(message, message.record.mean)
