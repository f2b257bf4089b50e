"""The mean of a quantity over all modules."""

from typing import Any

from ikkuna.export.messages import MessageBatch, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["MessageMeanSubscriber"]


class MessageMeanSubscriber(PlotSubscriber):
    r"""The mean over the L modules of a network, :math:`\frac 1 L \sum_l y_l`, with equal weights.

    Takes other subscribers' results, of which :math:`y_l` is the value, and any kind with a tensor, of which it is the mean element.
    Publishes ``{kind}_message_mean`` of the whole network once a step, in the unit of the kind.
    A module with several parameters counts once for each; one NaN makes the mean NaN; a step without a message publishes nothing.

    Look for: the same as in the kind itself, in one curve.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> MessageMeanSubscriber("weight_updates_weights_ratio").publishes
    ('weight_updates_weights_ratio_message_mean',)
    """

    fields = ("mean",)
    derived = True
    of_network = True

    def __init__(self, kind: str, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_message_mean")
        super().__init__(kind, **options)
        self._values: list[float] = []

    def compute(self, message: ModuleMessage) -> None:
        """Store the value of one module until the step is over."""
        assert message.record is not None
        self._values.append(message.record.mean)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Store the values of all modules until the step is over."""
        self._values += batch.records.mean.tolist()

    def finish(self, stamp: Stamp) -> None:
        """Emit the mean of the values of the step."""
        values, self._values = self._values, []
        if values:
            self.emit(NetworkMessage(stamp, self.publishes[0]), sum(values) / len(values))
