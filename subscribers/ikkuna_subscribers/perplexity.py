"""The perplexity of a language model."""

from typing import Any

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.accuracy import perplexity
from ikkuna.numerics.statistics import Record

__all__ = ["PerplexitySubscriber"]


class PerplexitySubscriber(SharedStatisticSubscriber):
    r"""The exponential of the mean loss, :math:`e^{L}`, for a cross-entropy L in nats.

    Takes ``loss``, as returned by the module given to ``set_loss``; publishes ``perplexity``, a number of choices, at least 1.
    Over micro-batches it is computed from the mean loss weighted by the number of labels; it is not a mean of perplexities.
    It is infinite for a loss above 709, and NaN for a loss of NaN or Inf.

    Look for: at the start it equals the number of classes or tokens, when all are equally likely; each halving is one bit learned.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> PerplexitySubscriber().publishes
    ('perplexity',)
    """

    fields = ("mean",)
    results = ("perplexity",)

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "perplexity")
        super().__init__("loss", **options)

    def values(self, record: Record) -> tuple[float]:
        """Return the perplexity."""
        return (perplexity(record.mean),)
