"""Base classes of metrics: with a chart, with a function of the user, of shared statistics; and of presets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.messages.batch import MessageBatch
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
