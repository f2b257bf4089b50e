"""How many tokens a language model is in doubt between."""

from typing import Any

from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.accuracy import perplexity

__all__ = ["PerplexitySubscriber"]


class PerplexitySubscriber(PlotSubscriber):
    r"""The exponential of the mean loss, :math:`e^{L}`, for a cross-entropy L in nats.

    Takes ``loss``, as the module given to ``set_loss`` returned it; publishes ``perplexity``, a number of choices, at least 1.
    Over micro-batches it is that of the mean loss weighted by the number of labels, not the mean of perplexities.
    It is infinite for a loss above 709, and NaN for a loss of NaN or Inf.

    Look for: the number of classes or tokens at the start, where all are equally likely; every halving is one bit learned.

    Parameters
    ----------
    **options
        See `Subscriber`.

    Examples
    --------
    >>> PerplexitySubscriber().publishes
    ('perplexity',)
    """

    fields = ("mean",)

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "perplexity")
        super().__init__("loss", **options)

    def compute(self, message: NetworkMessage) -> None:
        """Emit the perplexity."""
        assert message.record is not None
        self.emit(message, perplexity(message.record.mean))
