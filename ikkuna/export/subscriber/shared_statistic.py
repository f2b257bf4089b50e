"""The base class of metrics that are a function of shared statistics."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from ikkuna.export.messages.message import Message
from ikkuna.export.subscriber.plot import PlotSubscriber
from ikkuna.export.subscriber.result_names import name_results
from ikkuna.numerics.statistics import Record

__all__ = ["SharedStatisticSubscriber"]


class SharedStatisticSubscriber(PlotSubscriber):
    """A metric whose values are functions of the shared statistics of one tensor.

    A subclass sets `fields` and `results` and implements :meth:`values`.
    It publishes ``{kind}_{result}`` for each name in `results`.

    Parameters
    ----------
    kind : str
        The kind to measure.
    results : iterable of str, optional
        The names of the results, if they depend on the arguments of the subclass; by default the class attribute.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    results : sequence of str
        The last part of the name of each kind that is published.

    Examples
    --------
    >>> class RootMeanSquareSubscriber(SharedStatisticSubscriber):
    ...     '''The root of the mean square of all elements.'''
    ...     fields = ("sumsq",)
    ...     results = ("rms",)
    ...     def values(self, record):
    ...         return (record.rms,)
    >>> RootMeanSquareSubscriber("activations").publishes
    ('activations_rms',)
    """

    results: Sequence[str] = ()

    def __init__(self, kind: str, *, results: Iterable[str] | None = None, **options: Any) -> None:
        if results is not None:
            self.results = tuple(results)
        name_results(options, *(f"{kind}_{result}" for result in self.results))
        super().__init__(kind, **options)

    @abstractmethod
    def values(self, record: Record) -> Iterable[Any]:
        """Return one number for each name in `results`.

        Use properties of `record`, arithmetic and numpy functions only, without branches that depend on values:
        then the same method also works on statistics that are arrays with one element per tensor.
        """

    def compute(self, message: Message) -> None:
        """Emit the values."""
        assert message.record is not None
        for kind, value in zip(self.publishes, self.values(message.record), strict=True):
            self.emit(message, value, kind)
