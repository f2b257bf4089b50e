"""The base class of metrics that are a function of shared statistics."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from ikkuna.errors import ConfigError
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
    finite_only : bool
        Whether NaN and infinite elements are left out, for a subclass with `accepts_finite_only`.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `finite_only` is set and the subclass does not accept it.

    Attributes
    ----------
    results : sequence of str
        The last part of the name of each kind that is published.
        A subclass whose results depend on its arguments sets it before it calls this constructor.
    accepts_finite_only : bool
        Whether the values can be computed from the finite elements.

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
    accepts_finite_only: bool = False

    def __init__(self, kind: str, *, finite_only: bool = False, **options: Any) -> None:
        if finite_only and not self.accepts_finite_only:
            raise ConfigError(f"{type(self).__name__} always uses all elements; it has no finite_only=True")
        name_results(options, *(f"{kind}_{result}" for result in self.results))
        super().__init__(kind, **options)
        self.finite_only = finite_only

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
