"""The class every metric derives from."""

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Iterable
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.message.bundle import MessageBundle
from ikkuna.export.message.message import Message
from ikkuna.export.message.stamp import Stamp
from ikkuna.export.subscriber.subscription import ModulePattern, Subscription, SynchronizedSubscription
from ikkuna.modules import NamedModule
from ikkuna.numerics.statistics import closure
from ikkuna.visualization.backend import Backend, Series
from ikkuna.visualization.module_table import ModuleEntry

if TYPE_CHECKING:
    from ikkuna.export.messages.bus import MessageBus

__all__ = ["MERGES", "Subscriber"]

MERGES = ("sum", "min", "max", "last")
"""How rows of one identity become one over calls, micro-batches and ranks."""


class _Registering(ABCMeta):
    """Registers an instance that was given a bus, once its constructor is through and not before."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        subscriber = super().__call__(*args, **kwargs)
        if subscriber.message_bus is not None:
            subscriber.message_bus.register_subscriber(subscriber)
        return subscriber

    @property
    def __signature__(cls) -> Signature:
        """The constructor's, which ``help()`` and editors show; otherwise they would show that of ``__call__``."""
        whole = signature(cls.__init__)  # type: ignore[misc]  # whichever constructor it is, that one is meant
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Subscriber(metaclass=_Registering):
    """A metric: looks at messages of some kinds and emits numbers.

    Data takes one way.  ``measure`` sees the tensor, in the hook, and returns a small tensor, its *row*;
    rows of one identity merge over calls, micro-batches and ranks; ``compute`` sees the merged row as float64, when the batch is over.
    A metric that is a function of shared statistics sets `fields` in place of ``measure`` and finds them in ``message.record``.

    Parameters
    ----------
    kinds : str or list of str
        What to look at.
    publishes : str or list of str
        The kinds it emits; others can subscribe to them.
    join : bool
        Wait until there is one message of each kind and get them as a `MessageBundle`.
    subsample, modules, tag
        See `Subscription`.
    backend : str, Backend or a list of these
        Where values are shown: an installed backend's name (``"tb"``, ``"jsonl"``, ``"null"``) or an object.
    message_bus : MessageBus, optional
        A bus to register with at once; by default nothing outside this object is touched.
    gather : bool
        Let a metric that says nothing of a part of a tensor have tensors that are spread over ranks put together, at every step it samples.
    title, ylims
        What a person should read in place of the kind, and limits for backends that draw axes.

    Attributes
    ----------
    fields : collection of str
        Statistics it needs, from `ikkuna.numerics.statistics.FIELDS`.
    finite_only : bool
        Whether those statistics speak of finite elements alone, rather than being NaN when one is not finite.
    merge : str
        How its rows become one: ``"sum"``, ``"min"``, ``"max"`` or ``"last"``.
    derived : bool
        Whether it accepts other subscribers' results, which are floats and skip ``measure``.
    sees_skipped : bool
        Whether it also gets what was measured in a step that a gradient scaler skipped.
    needs_model : bool
        Whether it runs the model over data of its own; then ``self.evaluate`` is the exporter's, from registration on,
        and `modules` are the modules themselves.
    of_network : bool
        Whether what it makes of modules' messages belongs to the whole network.
    needs_whole : bool
        Whether its row says nothing if it is measured of a part of a tensor, as a spectrum does.
        Of a tensor that is spread over ranks its row is then :meth:`unknown`, or is measured of all elements with ``gather=True``.
    per_rank : bool
        Whether it also wants the records of each rank, as ``message.record.ranks``.

    Examples
    --------
    >>> class NearZeroSubscriber(Subscriber):
    ...     '''Share of elements with magnitude below eps.'''
    ...     def __init__(self, kind, eps=1e-3, **options):
    ...         super().__init__(kind, publishes=f"{kind}_near_zero", **options)
    ...         self.eps = eps
    ...     def measure(self, message):
    ...         near = (message.data.abs() < self.eps).sum()
    ...         return torch.stack([near, torch.full_like(near, message.data.numel())])
    ...     def compute(self, message):
    ...         near, n = message.data
    ...         self.emit(message, near / n)
    >>> import torch
    >>> NearZeroSubscriber("weights", subsample=10).publishes
    ('weights_near_zero',)
    """

    fields: Collection[str] = ()
    finite_only: bool = False
    merge: str = "sum"
    derived: bool = False
    sees_skipped: bool = False
    needs_model: bool = False
    of_network: bool = False
    needs_whole: bool = False
    per_rank: bool = False

    def __init__(
        self,
        kinds: str | Iterable[str],
        *,
        publishes: str | Iterable[str] = (),
        join: bool = False,
        subsample: int = 1,
        modules: ModulePattern = None,
        tag: str | None = "training",
        backend: "str | Backend | list[str | Backend]" = "tb",
        message_bus: "MessageBus | None" = None,
        gather: bool = False,
        title: str | None = None,
        ylims: tuple[float, float] | None = None,
    ) -> None:
        subscription = SynchronizedSubscription if join else Subscription
        self.subscription = subscription(self, kinds, tag, subsample, modules)
        self.publishes = (publishes,) if isinstance(publishes, str) else tuple(publishes)
        self.backends = tuple(backend) if isinstance(backend, list | tuple) else (backend,)
        if wrong := [b for b in self.backends if not isinstance(b, str | Backend)]:
            raise ConfigTypeError(f"backend needs a name or a Backend, got {type(wrong[0]).__name__} {wrong[0]!r}")
        self.message_bus = message_bus
        self.gather = gather
        self.title = title
        self.ylims = ylims
        self._bus: MessageBus | None = None
        self._series: dict[tuple[str, str | None, str], Series] = {}
        self.evaluate: Callable[..., None] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds it looks at."""
        return self.subscription.kinds

    @property
    def measures(self) -> bool:
        """Whether it has a ``measure`` of its own."""
        return type(self).measure is not Subscriber.measure

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """The modules that are looked at, with their classes and the shapes of their parameters; none before registration."""
        return self._bus.network if self._bus is not None else ()

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The modules it wants, for one that needs the model; none before registration.  To be read, not to be changed."""
        if self._bus is None or not self.needs_model:
            return ()
        return tuple(named for named in self._bus.modules if self.subscription.matches(named.name))

    def begin(self) -> None:
        """Look at the model before training goes on; called at registration of one that needs it, if it is known by then.

        What this raises is raised by the registration.
        """

    def measure(self, message: Any) -> Tensor | None:
        """Return the row of a message, a small tensor of fixed size and type, or ``None``.

        Called in the hook with the borrowed tensor in ``message.data``, detached, without gradient and autocast.
        It must not synchronise with the device, keep the tensor, write to it, or draw from a global random generator.
        """
        raise NotImplementedError

    def unknown(self, message: Any) -> Tensor:
        """Return the row that stands for a tensor of which only a part is here: NaN for each kind that is published."""
        return torch.full((max(len(self.publishes), 1),), torch.nan)

    @abstractmethod
    def compute(self, message: Any) -> None:
        """Turn a merged message (or bundle) into numbers and :meth:`emit` them; called when the batch is over."""

    def finish(self, stamp: Stamp) -> None:
        """Take the end of a step or pass that this subscriber samples, after everything of it was delivered.

        The place to emit what is made of several modules: ``self.emit(NetworkMessage(stamp, kind), value)``.
        """

    def emit(self, message: Message | MessageBundle, value: float, kind: str | None = None) -> None:
        """Publish `value` as a message of `kind` with the stamp and name of `message`, and show it.

        Raises
        ------
        ConfigError
            If `kind` is not among ``publishes``.
        """
        kind = kind or (self.publishes[0] if self.publishes else None)
        if kind not in self.publishes:
            raise ConfigError(f"{type(self).__name__} emits {kind!r} but publishes {list(self.publishes)}")
        value = float(value)
        self._show(message, value, kind)
        if self._bus is not None and self._bus.is_wanted(kind):
            self._bus.publish(message.result(kind, value))

    def show(self, message: Message | MessageBundle, value: Any) -> None:
        """Show `value`, a float or a histogram, under the kind and name of `message`, without publishing it."""
        self._show(message, value, message.first.kind if isinstance(message, MessageBundle) else message.kind)

    def _show(self, message: Message | MessageBundle, value: Any, kind: str) -> None:
        if self._bus is None:
            return
        stamp = message.stamp
        key = kind, message.series_name, stamp.pass_name
        if (series := self._series.get(key)) is None:
            series = self._series[key] = Series(*key, self.title, self.ylims)
        self._bus.show(series, value, stamp.global_step, self.backends)

    def check(self) -> None:
        """Raise `ConfigError` if this class cannot work as it stands; called at registration."""
        if self.merge not in MERGES:
            raise ConfigError(f"{type(self).__name__}.merge must be one of {', '.join(MERGES)}, got {self.merge!r}")
        if isinstance(self.fields, str):
            raise ConfigTypeError(
                f"{type(self).__name__}.fields must be a collection of names, got the string {self.fields!r}"
            )
        closure(self.fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.kinds)})"
