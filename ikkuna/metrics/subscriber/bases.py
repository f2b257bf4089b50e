"""Base classes of metrics: with a chart, with a function of the user, of shared statistics; and of presets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.messages.batch import MessageBatch
from ikkuna.metrics.messages.kinds import EVENT_KINDS, is_built_in
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.store.values import ModuleEntry


def name_results(options: dict[str, Any], *defaults: str) -> None:
    """Set ``options["publishes"]`` to `defaults`, unless it already holds the same number of other names.

    Parameters
    ----------
    options : dict of str to Any
        Keyword arguments for the constructor of `Subscriber`; changed in place.
    *defaults : str
        One name for each kind that the subscriber publishes.

    Raises
    ------
    ConfigError
        If ``options["publishes"]`` holds fewer or more names than `defaults`.

    Examples
    --------
    >>> options = {}
    >>> name_results(options, "weights_min", "weights_max")
    >>> options["publishes"]
    ('weights_min', 'weights_max')
    """
    given = options.setdefault("publishes", defaults)
    names = (given,) if isinstance(given, str) else tuple(given)
    if len(names) != len(defaults):
        wanted = ", ".join(defaults)
        raise ConfigError(f"publishes= needs {len(defaults)} names, for {wanted}; got {len(names)}: {list(names)}")


class PlotSubscriber(Subscriber):
    """A subscriber whose values are drawn with ``title`` and ``ylims``.

    Backends that draw axes use both; TensorBoard shows the title and chooses the limits itself.
    """


class CallbackSubscriber(Subscriber):
    """Calls ``function(message)`` for each message of some kinds.

    For data of modules and the network, the function is called in the hook and ``message.data`` is the borrowed tensor.
    The tensor is detached and must not be changed; clone it if you need it after the call.
    For events and results of other subscribers, the function is called after the end of the step.

    Parameters
    ----------
    kinds : str or list of str
        The kinds to subscribe to.
    function : callable
        Called with a message; its return value is ignored.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `function` is not callable.

    Examples
    --------
    >>> CallbackSubscriber("layer_gradients", lambda message: print(message.module, message.data.norm()))
    CallbackSubscriber(layer_gradients)
    """

    derived = True
    needs_float64 = False

    def __init__(self, kinds: str | Iterable[str], function: Callable[[Any], object], **options: Any) -> None:
        if not callable(function):
            raise ConfigTypeError(f"CallbackSubscriber needs a function of a message, got {type(function).__name__}")
        super().__init__(kinds, **options)
        self.function = function

    def measure(self, message: Any) -> None:
        """Call the function with the borrowed tensor."""
        self.function(message)

    def compute(self, message: Any) -> None:
        """Call the function with an event or a result."""
        self.function(message)


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
        values = list(self.values(batch.records if self.fields else batch))
        if len(values) != len(self.publishes):
            raise ValueError(f"values() returned {len(values)} results, expected {len(self.publishes)}")
        for kind, array in zip(self.publishes, values, strict=True):
            self.emit_batch(batch, array, kind)


STATISTICS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "norm2": (("sumsq",), lambda records: records.l2_norm),
    "mean": (("mean",), lambda records: records.mean),
    "variance": (("m2", "sumsq"), lambda records: records.variance()),
    "sparsity": (("zeros",), lambda records: records.sparsity),
    "nonfinite": (("nans", "infs"), lambda records: records.nonfinite),
    "min": (("min",), lambda records: records.min),
    "max": (("max",), lambda records: records.max),
    "count": (("n",), lambda records: records.n),
}
"""For each ending of a kind the statistics it needs, and the function that computes it from `Records`."""


def shared_kinds(kinds: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the kinds that are functions of shared statistics, as built-in kinds with the endings of the results.

    Examples
    --------
    >>> shared_kinds(["weights_norm2", "weights_mean", "train_accuracy"])
    {'weights': ('norm2', 'mean')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for kind in kinds:
        source, _, statistic = kind.rpartition("_")
        if statistic in STATISTICS and is_built_in(source) and source not in EVENT_KINDS:
            found[source] = (*found.get(source, ()), statistic)
    return found


class StatisticsReader(Subscriber):
    """Passes the shared statistics of one kind on to the rules.

    Parameters
    ----------
    kind : str
        The kind.
    statistics : tuple of str
        Keys of `STATISTICS`.
    receive : callable
        Stores one value for each message of a batch, under a kind.
    **options : Any
        See `Subscriber`.
    """

    derived = False

    def __init__(
        self,
        kind: str,
        statistics: tuple[str, ...],
        receive: Callable[[MessageBatch, str, NDArray[np.float64]], None],
        **options: Any,
    ) -> None:
        super().__init__(kind, **options)
        self.fields = tuple(dict.fromkeys(field for name in statistics for field in STATISTICS[name][0]))
        self._results = tuple((f"{kind}_{name}", STATISTICS[name][1]) for name in statistics)
        self._receive = receive

    def compute_batch(self, batch: MessageBatch) -> None:
        """Pass the values of all modules on."""
        for kind, function in self._results:
            values = np.broadcast_to(np.asarray(function(batch.records), np.float64), (len(batch),))
            self._receive(batch, kind, values)


GROUP = "ikkuna.presets"


class Preset(ABC):
    """A set of subscribers that is found by name through the entry-point group ``ikkuna.presets``.

    Attributes
    ----------
    network : tuple of ModuleEntry
        Names, classes and parameter shapes of the observed modules, which `ikkuna.watch` sets before it asks for the subscribers;
        empty before.
    rules : mapping
        Options of `Exporter.apply_rules`, such as ``{"every": 100}``.
    """

    network: tuple[ModuleEntry, ...] = ()
    rules: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return new subscribers; `sees_loss` is whether the outputs and labels are known from which the loss is computed."""
