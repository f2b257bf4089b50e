"""The base class of all metrics."""

import math
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from inspect import Signature, signature
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ikkuna.backends.backend import SPELLINGS, Backend
from ikkuna.backends.loggers import is_target
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.messages.batch import BatchNames, MeasuredStep, MessageBatch, StepLosses
from ikkuna.metrics.messages.message import Message, MessageBundle, NetworkMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.host import Host, Later, Name, Numbers, Result
from ikkuna.metrics.subscriber.state import MERGES, DeferredRow, pack, types_in, unpack
from ikkuna.metrics.subscriber.subscription import (
    ModulePattern,
    Schedule,
    Subscription,
    SynchronizedSubscription,
)
from ikkuna.numerics.statistics import needed_fields
from ikkuna.store.names import SeriesGroup
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.values import ModuleEntry, shown
from ikkuna.support.device_thread import Pending, is_full, run_beside
from ikkuna.support.modules import NamedModule

T = TypeVar("T")
_MOST_NAMES = 100_000
_MOST_GROUPS = 1024
_NETWORK: Name = None, "", None
METHODS = ("compute_step", "compute_batch", "compute")
"""The methods of which a subscriber implements one; each of the first two calls the next one by default."""


class _RegisteringType(ABCMeta):
    """Registers a new instance on its ``message_bus`` after the constructor has returned."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "every" in kwargs and "subsample" in kwargs:
            raise ConfigError(f"{cls.__name__} takes every= or subsample=, got both")
        subscriber = super().__call__(*args, **kwargs)
        if subscriber.message_bus is not None:
            subscriber.message_bus.register_subscriber(subscriber)
        return subscriber

    @property
    def __signature__(cls) -> Signature:
        """The signature of the constructor, for ``help()`` and editors; by default they show that of ``__call__``."""
        whole = signature(cls.__init__)  # type: ignore[misc]  # any override is meant
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class Subscriber(metaclass=_RegisteringType):
    """A metric: takes messages of some kinds and emits numbers.

    ``measure`` receives the tensor in the hook and returns a small tensor, its *row*.
    Rows of the same module and path are merged over calls, micro-batches and ranks.
    ``compute`` receives the merged row as a float64 array after the end of the step.
    A metric that is a function of shared statistics sets `fields` instead of ``measure`` and reads ``message.record``.

    Parameters
    ----------
    kinds : str or list of str
        The kinds to subscribe to.
    publishes : str or list of str
        The kinds that the subscriber emits; other subscribers can subscribe to them.
    join : bool
        Whether the messages of all kinds are delivered together, as one `MessageBundle`.
    every : int, optional
        Sample every n-th optimizer step, including step 0.
    subsample : int
        The older name of `every`.
    start, stop, schedule
        See `Subscription`.
    modules : str, Pattern, callable, sequence of them, or None
        See `Subscription`.
    tag : str or None
        See `Subscription`.
    backend : str, Backend or list of these
        Where values are shown: the name of an installed backend (``"tb"``, ``"jsonl"``, ``"null"``), a `Backend`,
        a ``SummaryWriter``, a logger of Lightning, or a function ``f(tag, value, step)``.
    message_bus : MessageBus, optional
        The bus to register with at once; by default the constructor has no effect outside this object.
    gather : bool
        For a metric with `needs_whole`: whether sharded tensors are gathered from all ranks on the steps it samples.
    title : str, optional
        The title of its charts; by default the kind.
    ylims : pair of float, optional
        Limits of the value axis, for backends that draw axes.

    Attributes
    ----------
    fields : collection of str
        The shared statistics that it reads, from `ikkuna.numerics.statistics.FIELDS`.
    measured_kinds : collection of str, optional
        The kinds whose tensors :meth:`measure` is called with; by default all.  Of the others it reads shared statistics alone.
    finite_only : bool
        Whether those statistics ignore NaN and Inf; otherwise they are NaN if an element is not finite.
    merge : {'sum', 'min', 'max', 'last', 'ranks'}
        How its rows are merged, see `MERGES`.
    is_of_function : bool
        Whether it calls a function of the user, so that what it publishes says more than its class.
    derived : bool
        Whether it accepts results of other subscribers, which are floats and skip ``measure``.
    sees_skipped : bool
        Whether it also receives measurements of steps that a gradient scaler skipped.
    needs_model : bool
        Whether it runs the model over its own data.
        From registration on, ``self.evaluate`` is then the exporter's, and `modules` are the modules themselves.
        On several ranks delivery waits for the others at the steps that it samples.
    stops : bool
        Whether it may raise `ikkuna.errors.StopTraining`.  On several ranks delivery then waits for the others at the end of each step.
    reads_model : bool
        Whether ``measure`` reads `modules` or `optimizers`, but the model is not run: no rank waits for another.
    of_network : bool
        Whether its results belong to the whole network although its inputs belong to modules.
    needs_whole : bool
        Whether its row is undefined for a part of a tensor, as that of a spectrum is.
        For a sharded tensor the row is then :meth:`unknown`, or is measured of the gathered tensor if ``gather=True``.
    needs_float64 : bool
        Whether ``measure`` gets a copy of the tensor on the host if its device does not compute in float64, as ``mps`` does not.
        The copy waits for the device.
    per_rank : bool
        Whether it also reads the records of the single ranks, as ``message.record.ranks``.
    needs_steps : Subscription, optional
        The training steps of which more than the loss is needed; by default all, as without a :meth:`compute_losses`.
    quantity : Quantity or sequence of Quantity
        What it publishes: unit, range, scale, what is good, and whether runs can be compared by it.
        One for all kinds, or one for each in the order of `publishes`; a subscriber that publishes nothing declares what it shows.
    state : collection of str
        The names of its attributes that :meth:`state_dict` returns: what it keeps from one step to the next.
    state_types : collection of type
        The classes of the objects that these attributes may contain besides numbers, texts, arrays, tensors and collections.

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
    measured_kinds: Collection[str] | None = None
    finite_only: bool = False
    merge: str = "sum"
    is_of_function: bool = False
    derived: bool = False
    sees_skipped: bool = False
    needs_model: bool = False
    stops: bool = False
    reads_model: bool = False
    of_network: bool = False
    needs_steps: Subscription | None = None
    needs_whole: bool = False
    needs_float64: bool = True
    per_rank: bool = False
    quantity: Quantity | Sequence[Quantity] = NEUTRAL
    state: Collection[str] = ()
    state_types: Collection[type] = ()

    def __init__(
        self,
        kinds: str | Iterable[str],
        *,
        publishes: str | Iterable[str] = (),
        join: bool = False,
        subsample: int = 1,
        every: int | None = None,
        start: int = 0,
        stop: int | None = None,
        schedule: Schedule | None = None,
        modules: ModulePattern = None,
        tag: str | None = TRAINING,
        backend: "str | Backend | list[str | Backend]" = "tb",
        message_bus: Host | None = None,
        gather: bool = False,
        title: str | None = None,
        ylims: tuple[float, float] | None = None,
    ) -> None:
        subscription = SynchronizedSubscription if join else Subscription
        step = subsample if every is None else every
        self.subscription = subscription(kinds, tag, step, modules, start, stop, schedule)
        self.publishes = (publishes,) if isinstance(publishes, str) else tuple(publishes)
        self.show_with(backend)
        if message_bus is not None and not callable(getattr(message_bus, "register_subscriber", None)):
            raise ConfigTypeError(f"message_bus needs a MessageBus, got {type(message_bus).__name__} {message_bus!r}")
        if title is not None and not isinstance(title, str):
            raise ConfigTypeError(f"title needs a string, got {type(title).__name__} {title!r}")
        self.message_bus = message_bus
        self.gather = gather
        self.title = title
        self.ylims = ylims
        self._host: Host | None = None
        self._untaken: list[Result | Later | Numbers] = []
        # The numbers among them, by the id of their stamp and by kind.
        self._untaken_numbers: dict[tuple[int, str], Numbers] = {}
        self._known_names: dict[tuple[Name, ...], BatchNames] = {}
        self._curve_groups: dict[tuple[BatchNames, str, str], SeriesGroup] = {}
        self.evaluate: Callable[..., None] | None = None

    def show_with(self, backend: "str | Backend | Sequence[str | Backend]") -> None:
        """Set the backends that show the values; call it before registration.

        Raises
        ------
        ConfigTypeError
            If it is no backend, name of one, logger or function, and no list of these.
        """
        backends = tuple(backend) if isinstance(backend, list | tuple) else (backend,)
        if wrong := [b for b in backends if not is_target(b)]:
            raise ConfigTypeError(
                f"backend needs a name, a Backend, a logger or a function, got {type(wrong[0]).__name__} {wrong[0]!r}"
            )
        self.backends: tuple[Any, ...] = tuple(SPELLINGS.get(b, b) if isinstance(b, str) else b for b in backends)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds it subscribes to."""
        return self.subscription.kinds

    @property
    def measures(self) -> bool:
        """Whether ``measure`` is called: its class overrides it.  The value of a subclass may change from one step to the next."""
        return type(self).measure is not Subscriber.measure

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """Names, classes and parameter shapes of the observed modules; empty before registration."""
        return self._host.network if self._host is not None else ()

    @property
    def takes_model(self) -> bool:
        """Whether it runs or reads the model, see `needs_model` and `reads_model`."""
        return self.needs_model or self.reads_model

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The modules it subscribes to, to read and not to change; empty before registration or if `takes_model` is false."""
        if self._host is None or not self.takes_model:
            return ()
        return tuple(named for named in self._host.modules if self.subscription.matches(named.name))

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the model, to read and not to change; empty before registration or if `takes_model` is false."""
        return () if self._host is None or not self.takes_model else self._host.optimizers

    def begin(self) -> None:
        """Prepare for training; called at registration if `takes_model` is true and the model has been added.

        An exception is raised by the registration.
        """

    def measure(self, message: Any) -> Tensor | DeferredRow | None:
        """Return the row of a message, a small tensor of fixed size and type, or ``None``.

        Called in the hook with the borrowed tensor in ``message.data``, detached, without gradients and autocast.
        It must not synchronise with the device; a row that cannot be computed without that is a `DeferredRow`.
        It must not keep the tensor, write to it, or draw from a global random generator.
        """
        raise NotImplementedError

    def unknown(self, message: Any) -> Tensor:
        """Return the row of a tensor of which this rank holds only a part: NaN for each published kind."""
        return torch.full((max(len(self.publishes), 1),), torch.nan, device="cpu")

    def compute(self, message: Any) -> None:
        """Compute numbers from a merged message or bundle and :meth:`emit` them; called after the end of the step.

        A subclass implements this method or :meth:`compute_batch`; by default each of them calls the other.
        """
        if isinstance(message, MessageBundle):
            parts = {kind: MessageBatch.of(part) for kind, part in message.messages.items()}
            self.compute_batch(MessageBatch.joined(parts, [message.data]))
        else:
            self.compute_batch(MessageBatch.of(message))

    def compute_batch(self, batch: MessageBatch) -> None:
        """Compute numbers from all messages of one kind and step and :meth:`emit_batch` them; by default one by one.

        If the kinds are joined, `batch` has a batch of each kind, ``batch["weights"]``.
        By default :meth:`compute` is called with each message.  The bus calls it so that an error loses one message alone.
        A subclass that overrides `compute` receives the messages one by one, also if its base class has a `compute_batch`.

        Raises
        ------
        TypeError
            If the class has only :meth:`compute_step`, which wants all batches of a step together.
        """
        if type(self).compute is Subscriber.compute and "compute" not in vars(self):
            raise TypeError(f"{type(self).__name__} takes whole steps: call compute_step()")
        for message in batch:
            self.compute(message)

    def compute_step(self, step: MeasuredStep) -> None:
        """Handle all that was measured in a step for this subscriber; by default :meth:`compute_batch` is called with each batch.

        A subclass that overrides it decides which batches are made.  An error loses all of them.
        Events, and results of other subscribers, are passed to :meth:`compute_batch`.
        """
        for batch in step:
            self.compute_batch(batch)

    def compute_losses(self, block: StepLosses) -> None:
        """Handle the losses of training steps in a row, in place of :meth:`compute` and :meth:`finish` of each of them.

        Called if the steps are none of `needs_steps`, and if nothing else was wanted of them.
        """

    def loss_threshold(self) -> float:
        """Return the loss above which a step is measured itself, as far as no forward is needed; infinite by default."""
        return math.inf

    def gradient_threshold(self) -> float | None:
        """Return the same for the norm of the gradients, or ``None``, the default, if it need not be read for this subscriber."""
        return None

    def later(
        self,
        message: Message,
        devices: Iterable[torch.device],
        work: Callable[[], T],
        then: Callable[[Pending[T]], None],
    ) -> None:
        """Call `work`, which waits for devices, beside training, and pass its result to `then` at a boundary between steps.

        Steps that follow are delivered afterwards.  On the host both are called at once.
        While four results of this subscriber are still being computed, further ones are dropped and counted.

        Parameters
        ----------
        message : Message
            The message that the result belongs to.
        devices : iterable of torch.device
            The devices on which `work` computes.
        work : callable
            Called in another thread, without gradients, in the order of the calls of this method.
            Its tensors must not be changed by training.
        then : callable
            Called with a `Pending`, which returns the result or raises the exception of `work` when it is called.
        """
        devices = tuple(devices)
        if self._host is not None and is_full(devices, self):
            self._host.drop_late(self)
            return
        pending = run_beside(devices, work, self)
        if self._host is None or all(device.type == "cpu" for device in devices):
            then(pending)
        else:
            self._keep_result(Later(message.stamp, pending, then))

    def finish(self, stamp: Stamp) -> None:
        """Handle the end of a step or pass that this subscriber samples, after all its messages were delivered.

        A result of several modules is emitted here: ``self.emit(NetworkMessage(stamp, kind), value)``.
        """

    def abandon(self, stamp: Stamp) -> None:
        """Forget what was received of a step, because an exception such as `KeyboardInterrupt` has interrupted its delivery.

        By default :meth:`finish` is called, and what it emits is discarded.
        Override this method if `finish` also changes what is kept over several steps.
        """
        host = self._host
        try:
            self._host = None
            self.finish(stamp)
        finally:
            self._host = host

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept over several steps, the attributes named in `state`, as plain values for a checkpoint."""
        return {name: pack(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Raises
        ------
        ConfigError
            If `state` has other names, or cannot be read.
        """
        if not isinstance(state, dict) or set(state) != set(self.state):
            raise ConfigError(f"{type(self).__name__} needs the state {sorted(self.state)}, got {state!r:.200}")
        types = {kind.__name__: kind for kind in self.state_types}
        found = {name: unpack(state[name], types | types_in(getattr(self, name))) for name in self.state}
        for name, value in found.items():
            own = getattr(self, name)
            if isinstance(own, dict):  # it may be a defaultdict or a Counter
                own.clear()
                own.update(value)
            else:
                setattr(self, name, value)

    def emit(self, message: Message | MessageBundle, value: float, kind: str | None = None) -> None:
        """Publish `value` as a message of `kind` with the stamp and name of `message`, and show it.

        Raises
        ------
        ConfigError
            If `kind` is not among ``publishes``.
        """
        kind, value = kind if kind in self.publishes else self._checked_kind(kind), float(value)
        if (host := self._host) is None:
            return
        first: Message = message.first if isinstance(message, MessageBundle) else message
        key = id(first.stamp), kind
        name = _NETWORK if type(first) is NetworkMessage and not first.path else _name(first)
        if (numbers := self._untaken_numbers.get(key)) is None:
            numbers = self._untaken_numbers[key] = Numbers(first.stamp, kind, [name], [value])
            self._untaken.append(numbers)
        else:  # an interrupt may come between two lines
            numbers.names.append(name)
            numbers.values.append(value)
        if not host.thread.subscriber_is_running:
            host.take_results(self)

    def _checked_kind(self, kind: str | None) -> str:
        if not self.publishes:
            raise ConfigError(
                f"{type(self).__name__} emits a value but publishes no kind; pass publishes=, or call show()"
            )
        kind = kind or self.publishes[0]
        if kind not in self.publishes:
            raise ConfigError(f"{type(self).__name__} emits {kind!r} but publishes {list(self.publishes)}")
        return kind

    def emit_batch(self, batch: MessageBatch, values: Any, kind: str | None = None) -> None:
        """Publish one value for each message of `batch`, as :meth:`emit` does for one message, and show them.

        Parameters
        ----------
        batch : MessageBatch
            The messages that the values were computed from.
        values : array
            ``(messages,)``; a single number stands for all of them.  They are copied.
        kind : str, optional
            The kind to publish; by default the first one.

        Raises
        ------
        ConfigError
            If `kind` is not among ``publishes``.
        ValueError
            If there is not one value for each message.
        """
        kind = kind if kind in self.publishes else self._checked_kind(kind)
        if (host := self._host) is not None:
            self._untaken.append(self._result_of(batch.stamp, batch.names, kind, values, is_published=True))
            if not host.thread.subscriber_is_running:
                host.take_results(self)

    def show(self, message: Message | MessageBundle, value: Any) -> None:
        """Show `value` under the kind and name of `message`, without publishing it.

        `value` is a number, a histogram such as :class:`~ikkuna.numerics.statistics.histogram.Histogram`, a matrix, or a text (a page of
        Markdown).

        Raises
        ------
        ConfigError
            If backends cannot store the value; it counts as a failure of this subscriber.
        """
        if self._host is not None:
            first = message.first if isinstance(message, MessageBundle) else message
            [series] = self._curve_group(self._batch_names((_name(first),)), first.kind, first.tag).series
            self._keep_result(Result(*shown(series, value, first.global_step), first.stamp))

    def show_batch(self, batch: MessageBatch, values: Any, kind: str | None = None) -> None:
        """Show a value for each message of `batch`, as :meth:`show` does for one message: an array, or a list with ``None``
        for those that have nothing to show.
        """
        if self._host is None:
            return
        kind = kind or batch.kind
        if isinstance(values, np.ndarray):
            self._keep_result(self._result_of(batch.stamp, batch.names, kind, values, is_published=False))
            return
        group, step = self._curve_group(batch.names, kind, batch.stamp.pass_name), batch.stamp.global_step
        for series, value in zip(group.series, values, strict=True):
            if value is not None:
                self._keep_result(Result(*shown(series, value, step), batch.stamp))

    def _result_of(self, stamp: Stamp, names: BatchNames, kind: str, values: Any, is_published: bool) -> Result:
        found = np.array(values, np.float64)
        if found.shape != (len(names.names),):
            if found.ndim:  # an array of one value would stand for all messages
                raise ValueError(
                    f"one value for each of {len(names.names)} messages is needed, got shape {found.shape}"
                )
            found = np.broadcast_to(found, (len(names.names),))
        group = self._curve_groups.get((names, kind, stamp.pass_name)) or self._curve_group(
            names, kind, stamp.pass_name
        )
        return Result("add_group", (group, found, stamp.global_step), stamp, names if is_published else None)

    def _curve_group(self, names: BatchNames, kind: str, pass_name: str) -> SeriesGroup:
        """Return the curves of a kind, the same object at each step, so that backends can keep what they compute for it."""
        key = names, kind, pass_name
        if (found := self._curve_groups.get(key)) is None:
            if len(self._curve_groups) >= _MOST_GROUPS:  # the modules that are called change from step to step
                self._curve_groups.clear()
            rest = pass_name, self.title, self.ylims, self.quantity_of(kind)
            found = self._curve_groups[key] = SeriesGroup(kind, names.names, *rest)
        return found

    def _batch_names(self, names: tuple[Name, ...]) -> BatchNames:
        """Return the names of messages as one object, the same at each step."""
        if (known := self._known_names.get(names)) is None:
            if sum(map(len, self._known_names)) > _MOST_NAMES:  # the modules that are called change from step to step
                self._known_names.clear()
            known = self._known_names[names] = BatchNames(*zip(*names, strict=True))
        return known

    def _keep_result(self, result: Result | Later) -> None:
        if self._host is not None:
            self._untaken.append(result)
            if not self._host.thread.subscriber_is_running:  # the user calls a method of the subscriber
                self._host.take_results(self)

    def take_results(self) -> list[Result | Later]:
        """Return what was emitted and shown since the last call, the numbers of one kind and step together; the bus calls it."""
        taken: list[Any] = self._untaken
        self._untaken = []
        if self._untaken_numbers:
            self._untaken_numbers = {}
            for i, each in enumerate(taken):
                if type(each) is Numbers:
                    names = tuple(each.names[: len(each.values)])
                    if (known := self._known_names.get(names)) is None:
                        known = self._batch_names(names)
                    taken[i] = self._result_of(each.stamp, known, each.kind, each.values, is_published=True)
        return taken

    def quantity_of(self, kind: str) -> Quantity:
        """Return what a kind that this subscriber publishes or shows is."""
        declared, names = self.quantity, self.publishes or self.kinds
        if not isinstance(declared, Quantity):
            declared = declared[names.index(kind)] if kind in names else NEUTRAL
        return replace(declared, sources=self.kinds, statistics=tuple(self.fields))

    def _check_quantity(self) -> None:
        declared, names = self.quantity, self.publishes or self.kinds
        several = list(declared) if isinstance(declared, Sequence) else [declared]
        if wrong := [each for each in several if not isinstance(each, Quantity)]:
            raise ConfigTypeError(
                f"{type(self).__name__}.quantity needs a Quantity, got {type(wrong[0]).__name__} {wrong[0]!r}"
            )
        if not isinstance(declared, Quantity) and len(several) < len(names):
            raise ConfigError(
                f"{type(self).__name__}.quantity needs one Quantity, or one for each of {', '.join(names)}, got {len(several)}"
            )

    def check(self) -> None:
        """Raise `ConfigError` if an attribute of the class is invalid; called at registration."""
        self._check_quantity()
        if not any(getattr(type(self), name) is not getattr(Subscriber, name) for name in METHODS):
            raise ConfigError(f"{type(self).__name__} needs a method compute or compute_batch, it has neither")
        if self.merge not in MERGES:
            raise ConfigError(f"{type(self).__name__}.merge must be one of {', '.join(MERGES)}, got {self.merge!r}")
        if isinstance(self.fields, str):
            raise ConfigTypeError(
                f"{type(self).__name__}.fields must be a collection of names, got the string {self.fields!r}"
            )
        needed_fields(self.fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.kinds)})"


def _name(message: Message) -> Name:
    return getattr(message, "module", None), getattr(message, "path", ""), message.series_name
