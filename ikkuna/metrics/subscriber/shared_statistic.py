"""The base class of metrics that are a function of shared statistics."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ikkuna.errors import ConfigError
from ikkuna.metrics.messages.batch import MessageBatch
from ikkuna.metrics.subscriber.plot import PlotSubscriber
from ikkuna.metrics.subscriber.result_names import name_results

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
        """Return an array with one number for each module, or a number for all of them, for each name in `results`.

        `record` is a `Records`: its properties are arrays with one element for each module.
        Without `fields` it is the batch, whose ``data`` are the rows that ``measure`` has returned, or the numbers of results.
        Use arithmetic and numpy functions, without branches that depend on values.
        """

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the values of all modules."""
        with np.errstate(all="ignore"):
            values = list(self.values(batch.records if self.fields else batch))
        if len(values) != len(self.publishes):
            raise ValueError(f"values() returned {len(values)} results, expected {len(self.publishes)}")
        for kind, array in zip(self.publishes, values, strict=True):
            self.emit_batch(batch, array, kind)
