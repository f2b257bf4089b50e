"""The bus that delivers messages to subscribers and owns the run that values are written to."""

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer

from ikkuna.backends.run import Run
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.bus.delivery import Delivery
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.bus.registration import Source, StoredStates, check_registration, known_kinds
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.subscription import Sampling
from ikkuna.store.run_directory import Continued, RunSettings, check_log_dir
from ikkuna.store.values import ModuleEntry
from ikkuna.support.modules import NamedModule, class_name, definition, parameters_of, shape_of, signature


def described(modules: Iterable[NamedModule]) -> tuple[ModuleEntry, ...]:
    """Return an entry for each module, in the same order; a shared parameter is listed once.

    Examples
    --------
    >>> from torch import nn
    >>> described([NamedModule("fc", nn.Linear(3, 2))])
    (ModuleEntry(name='fc', class_name='Linear', parameters=(('weight', (2, 3)), ('bias', (2,))), aliases=()),)
    """
    modules = tuple(modules)
    owned: dict[str, list[tuple[str, tuple[int, ...] | None]]] = {}
    for named in parameters_of(modules):
        role = named.path or ("bias" if named.is_bias else "weight")
        owned.setdefault(named.module, []).append((role, shape_of(named.parameter)))
    return tuple(
        ModuleEntry(
            named.name,
            class_name(named.module),
            tuple(owned.get(named.name, ())),
            named.aliases,
            definition(named.owner) if named.owner is not None else "",
        )
        for named in modules
    )


_PATIENCE = 5.0  # seconds
_DEFAULT = RunSettings(verbosity=1)


class _Place(NamedTuple):
    """The place of a source on a bus, and the subscribers that were registered before it was attached."""

    source: "weakref.ref[Source]"
    earlier: tuple[Registered, ...]


class Handle:
    """Removes one registration."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Unregister the subscriber; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


def _type_text(value: Any) -> str:
    return f"the class {value.__name__}; pass an instance" if isinstance(value, type) else type(value).__name__


class MessageBus(Delivery):
    """Delivers messages to subscribers in the order of their registration.

    Parameters
    ----------
    name : str
        Name of the bus in log lines and errors.
    log_dir : path, optional
        The directory of the run; by default that of the first exporter with one, or ``run``.

    Attributes
    ----------
    registered : tuple of Registered
        The registered subscribers in the order of registration.
    error_guard : ErrorGuard
        Handles the errors of subscribers and hooks.
    sampling : Sampling
        What the user has switched while training runs.
    is_silent : bool
        Whether values are discarded, because another rank writes the run.
    settings : RunSettings
        The name of the run, its hyper-parameters, and whether it continues another one.
    continued : Continued or None
        The stored run that the first value continues.
    calls_model : bool
        Whether a subscriber calls the model.
    queue : deque of Item
        Events and measurements of steps that have not been delivered.
    """

    def __init__(self, name: str = "bus", log_dir: str | Path | None = None) -> None:
        super().__init__(ErrorGuard())
        self.name = name
        self.log_dir = log_dir
        self._is_registering = False
        self._places: dict[int, _Place] = {}  # by the ids of the sources, in the order of their attachment
        self.sampling = Sampling()
        self.is_silent = False
        self.settings = _DEFAULT
        self.continued: Continued | None = None
        self._states = StoredStates()
        self.calls_model = False

    # -- registration ---------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that can be subscribed to: the built-in kinds and those that subscribers publish."""
        return known_kinds(self._subscribers)

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """Names, classes and parameter shapes of the observed modules, in the order of the network."""
        return described(self.modules)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The open exporters, which are referred to weakly."""
        sources = (place.source() for place in list(self._places.values()))
        return tuple(source for source in sources if source is not None)

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The observed modules, in the order of the network."""
        return tuple(named for source in self.sources for named in source.modules)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that own parameters of the observed models."""
        return tuple(optimizer for source in self.sources for optimizer in source.optimizers)

    def register_subscriber(self, subscriber: Subscriber) -> Handle:
        """Register `subscriber` from the next step on; return a handle that unregisters it.

        Raises
        ------
        ConfigError
            If a kind is unknown, if another subscriber publishes the same result, if results form a cycle,
            or if the class cannot work by itself or with this model.  The bus is unchanged then.
        """
        if not isinstance(subscriber, Subscriber):
            raise ConfigTypeError(f"register_subscriber() needs a Subscriber, got {_type_text(subscriber)}")
        if subscriber._host is not None:
            raise ConfigError(
                f"{subscriber!r} is registered already; create another instance for a second registration"
            )
        subscriber.check()
        self._check_registration(subscriber)
        Run(self.log_dir or "run").prepare(subscriber.backends)  # raises if a value could not be shown
        subscriber._host = self
        if subscriber.takes_model:
            self._lend_model(subscriber)
        registered = Registered(subscriber, self.error_guard.call, self.sampling)
        try:
            self._states.apply(registered)
        except ConfigError:
            subscriber._host = subscriber.evaluate = None
            raise
        self._set_registered((*self.registered, registered))
        return Handle(lambda: self._unregister(subscriber))

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Prepare the exporters once for all subscribers that are registered or unregistered inside, at the end."""
        outer, self._is_registering = self._is_registering, True
        try:
            yield
        finally:
            self._is_registering = outer
            self._demand_changed()

    def _check_registration(self, subscriber: Subscriber) -> None:
        names = frozenset[str]().union(*(source.module_names for source in self.sources))
        registered = self.registered
        try:
            check_registration(subscriber, tuple(r.subscriber for r in registered), names)
        except ConfigError:
            self._release_unreachable()
            if self.registered == registered:  # the garbage collector may also have run before
                raise
            self._check_registration(subscriber)

    def _release_unreachable(self) -> None:
        """Close the exporters of models that are gone, and unregister the subscribers of their runs."""
        deadline = time.monotonic() + _PATIENCE
        if any(source.is_forgotten for source in self.sources):
            gc.collect()
        # gc.collect() does nothing while the garbage collector runs in another thread, which may be closing an exporter
        while any(place.source() is None for place in list(self._places.values())) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _lend_model(self, subscriber: Subscriber) -> None:
        subscriber.evaluate = self._evaluate
        if len(self.sources) != 1 or self.sources[0].model is None:
            return  # modules may be added later
        try:
            subscriber.begin()
        except BaseException:
            subscriber._host = subscriber.evaluate = None
            raise

    def _unregister(self, subscriber: Subscriber) -> None:
        subscriber._host = subscriber.evaluate = None
        self._set_registered(tuple(r for r in self.registered if r.subscriber is not subscriber))

    @property
    def _subscribers(self) -> tuple[Subscriber, ...]:
        return tuple(r.subscriber for r in self.registered)

    def _set_registered(self, registered: tuple[Registered, ...]) -> None:
        self.registered = registered
        self.calls_model = any(r.subscriber.needs_model for r in registered)
        by_kind: dict[str, list[Registered]] = {}
        for each in registered:
            for kind in dict.fromkeys(each.kinds):
                by_kind.setdefault(kind, []).append(each)
        self.by_kind = {kind: tuple(takers) for kind, takers in by_kind.items()}
        self._demand_changed()

    def _demand_changed(self) -> None:
        for source in () if self._is_registering else self.sources:
            source.demand_changed()

    def subscriber_states(self) -> list[dict[str, Any]]:
        """Return what the subscribers keep over several steps, for a checkpoint."""
        return self._states.of(self.registered)

    def load_subscriber_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of subscribers; those of subscribers that are registered later wait for them.

        Raises
        ------
        ConfigError
            If a subscriber cannot load its state.
        """
        self._states.load(self.registered, states)

    def _evaluate(self, batches: Iterable[Any], name: str | None = "testing", **options: Any) -> None:
        if len(self.sources) != 1:
            raise ConfigError(f"a subscriber can evaluate the model of one exporter, this bus has {len(self.sources)}")
        self.sources[0].evaluate(batches, name, **options)

    def attach(self, source: Source, settings: RunSettings) -> None:
        """Add an exporter; raise `ConfigError` if it has another log directory, or other settings of the run."""
        log_dir, own = settings.log_dir, replace(settings, log_dir=None)
        if own != _DEFAULT and self.settings not in (own, _DEFAULT):
            raise ConfigError(
                f"bus {self.name!r} has another exporter with a run_name, config or resume of its own; "
                "close() the other exporter, or pass message_bus=MessageBus() for a separate run"
            )
        if log_dir is not None:
            if self.log_dir is not None and Path(log_dir) != Path(self.log_dir):
                raise ConfigError(
                    f"bus {self.name!r} writes to {str(self.log_dir)!r} already, not to {str(log_dir)!r}; "
                    "close() the other exporter, or pass message_bus=MessageBus() for a separate run"
                )
            check_log_dir(log_dir)
            self.log_dir = log_dir
        if own != _DEFAULT:
            self.settings = own
        if not self._places:
            self.error_guard.reset()
        self._places[id(source)] = _Place(weakref.ref(source), self.registered)

    def detach(self, source: Source) -> None:
        """Remove an exporter; with the last one, close the run and unregister every subscriber.

        With a forgotten exporter, the subscribers are unregistered that belong to no later one, and a new run begins.
        """
        self._places.pop(id(source), None)
        if not self._places:
            self.close()
        elif source.is_forgotten:
            first, *_ = self._places.values()
            if first.earlier:
                self._end_run(first.earlier)

    # -- the run --------------------------------------------------------------------------------------------------

    def open_run(self) -> Run | None:
        """Return the open run, and open one if there is none; ``None`` if another rank writes the run."""
        if self.run is None and not self.is_silent:
            models = [source.model for source in self.sources]
            whole = signature(models[0]) if len(models) == 1 and models[0] is not None else None
            self.run = Run(self.log_dir or "run", self.network, self.settings, self.continued, whole)
        return self.run

    def close(self) -> None:
        """Deliver the queue, close the run, and unregister every subscriber."""
        self._end_run(self.registered)
        self.log_dir, self.settings, self.continued = None, _DEFAULT, None
        self.sampling = Sampling()

    def _end_run(self, unregistered: tuple[Registered, ...]) -> None:
        """Deliver the queue, unregister subscribers, and close the run; another value opens another run."""
        self.drain(wait=True)
        self.settle()
        for registered in unregistered:
            registered.subscriber._host = registered.subscriber.evaluate = None
        self._set_registered(tuple(r for r in self.registered if r not in unregistered))
        if self.run is not None:
            self.run.close()
            self.run = None


@cache
def get_default_bus() -> MessageBus:
    """Return the bus that exporters use by default."""
    return MessageBus("default")
