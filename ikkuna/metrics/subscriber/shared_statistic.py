"""The base class of metrics that are a function of shared statistics."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ikkuna.errors import ConfigError
from ikkuna.metrics.messages.batch import MessageBatch, NotVectorizedError
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.plot import PlotSubscriber
from ikkuna.metrics.subscriber.result_names import name_results
from ikkuna.support.failures import raise_users_exception

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
    def values(self, record: Any) -> Iterable[Any]:
        """Return one number for each name in `results`, or one array of such numbers.

        Use properties of `record`, arithmetic and numpy functions only, without branches that depend on values:
        `record` is a `Record`, or `Records` with arrays of one element per tensor, so that all modules are computed in one call.
        A method that fails with arrays is called for one tensor after the other.
        """

    def values_of(self, message: Message) -> Iterable[Any]:
        """Return the values of one message."""
        assert message.record is not None
        return self.values(message.record)

    def compute(self, message: Message) -> None:
        """Emit the values."""
        for kind, value in zip(self.publishes, self.values_of(message), strict=True):
            self.emit(message, value, kind)

    @property
    def takes_batches(self) -> bool:
        """Whether the values of all modules are computed in one call; the records of ranks are no arrays."""
        return bool(self.fields) and not self.per_rank and not self.measures and super().takes_batches

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the values of all modules.

        Raises
        ------
        NotVectorizedError
            If :meth:`values` fails with arrays.
        """
        try:
            with np.errstate(all="ignore"):
                values = [np.asarray(array, np.float64) for array in self.values(batch.records)]
            arrays = [np.broadcast_to(array, (len(batch.names.names),)) for array in values]
        except Exception as error:
            raise_users_exception(error)
            raise NotVectorizedError from error
        for kind, array in zip(self.publishes, arrays, strict=True):
            self.emit_batch(batch, array, kind)
