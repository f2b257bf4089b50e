"""The loss of a step."""

from typing import Any

from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["LossSubscriber"]


class LossSubscriber(PlotSubscriber):
    """The loss: what the module given to ``set_loss`` returns, or else the scalar on which ``backward()`` is called.

    Takes ``loss`` and shows it; it publishes nothing, because the loss is a kind already.
    Over micro-batches it is their mean weighted by the number of labels; a loss per element is averaged.

    Look for: a plateau, a sudden rise, or a NaN.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> LossSubscriber(subsample=10).kinds
    ('loss',)
    """

    fields = ("mean",)

    def __init__(self, **options: Any) -> None:
        super().__init__("loss", **options)

    def compute(self, message: NetworkMessage) -> None:
        """Show the loss."""
        assert message.record is not None
        self.show(message, message.record.mean)
