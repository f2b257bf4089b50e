"""Carries messages from whoever publishes to whoever subscribed, and owns the run that values are shown in."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.message.message import Message
from ikkuna.export.messages.error_guard import ErrorGuard
from ikkuna.export.messages.registration import check_registration, known_kinds
from ikkuna.export.model.module_entries import described
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.export.subscriber.subscription import Subscription
from ikkuna.modules import NamedModule
from ikkuna.visualization.backend import Series
from ikkuna.visualization.files.run_directory import check_log_dir
from ikkuna.visualization.module_table import ModuleEntry
from ikkuna.visualization.run import Run

__all__ = ["Finished", "Handle", "MessageBus", "Source", "get_default_bus"]

log = logging.getLogger("ikkuna")


class Source(Protocol):
    """What publishes on a bus: an exporter."""

    @property
    def modules(self) -> Sequence[NamedModule]:
        """The modules it looks at, in their order in the network."""

    @property
    def module_names(self) -> frozenset[str]:
        """Their names."""

    @property
    def model(self) -> nn.Module | None:
        """The whole network, if it is known."""

    def demand_changed(self) -> None:
        """Take a change of what subscribers want."""

    @property
    def evaluate(self) -> Callable[..., None]:
        """Runs the model over data and leaves training as it was."""

    def close(self) -> None:
        """Stop publishing."""


class Finished(Protocol):
    """The measurements of a step or pass that is over, queued between events."""

    def arrived(self) -> bool:
        """Whether all measurements have reached the host."""

    def deliver(self, bus: "MessageBus") -> None:
        """Deliver every measurement to the subscribers that want it."""


class Handle:
    """Undoes one registration."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Unregister; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class MessageBus:
    """Delivers messages in the order subscribers were registered.

    Parameters
    ----------
    name : what to call it in messages to a person
    log_dir : where its run is written; ``run`` by default, or what the first exporter says

    Attributes
    ----------
    subscriptions : tuple of Subscription
        In the order of registration.
    error_guard : ErrorGuard
        What went wrong.
    is_silent : bool
        Whether no run is opened: of several ranks one writes.
    """

    def __init__(self, name: str = "bus", log_dir: str | Path | None = None) -> None:
        self.name = name
        self.log_dir = log_dir
        self.subscriptions: tuple[Subscription, ...] = ()
        self._by_kind: dict[str, tuple[Subscription, ...]] = {}
        self.sources: tuple[Source, ...] = ()
        self.error_guard = ErrorGuard()
        self.is_silent = False
        self._queue: deque[Message | Finished] = deque()
        self._draining = False
        self._run: Run | None = None

    # -- who takes part -------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that can be subscribed to: the built-in ones and what subscribers announced."""
        return known_kinds(self.subscriptions)

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """What there is to tell of the modules that are looked at, in their order in the network."""
        return described(self.modules)

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The modules that are looked at."""
        return tuple(named for source in self.sources for named in source.modules)

    def register_subscriber(self, subscriber: Subscriber) -> Handle:
        """Let `subscriber` take part from the next step on; return what undoes it.

        Raises
        ------
        ConfigError
            For a kind nobody publishes, a result somebody else publishes already, a circle of results, or a class that cannot work,
            in itself or with this model.  The bus is unchanged then.
        """
        if not isinstance(subscriber, Subscriber):
            raise ConfigTypeError(f"register_subscriber() needs a Subscriber, got {type(subscriber).__name__}")
        if subscriber._bus is not None:
            raise ConfigError(f"{subscriber!r} is registered already; make another one for a second registration")
        subscriber.check()
        names = frozenset(name for source in self.sources for name in source.module_names)
        check_registration(subscriber, self.subscriptions, names)
        Run(self.log_dir or "run").prepare(subscriber.backends)
        subscriber._bus = self
        if subscriber.needs_model:
            self._lend_model(subscriber)
        self._set_subscriptions((*self.subscriptions, subscriber.subscription))
        return Handle(lambda: self._unregister(subscriber))

    def _lend_model(self, subscriber: Subscriber) -> None:
        subscriber.evaluate = self._evaluate
        if len(self.sources) != 1 or self.sources[0].model is None:
            return  # modules may be added later
        try:
            subscriber.begin()
        except BaseException:
            subscriber._bus = subscriber.evaluate = None
            raise

    def _unregister(self, subscriber: Subscriber) -> None:
        subscriber._bus = None
        self._set_subscriptions(tuple(s for s in self.subscriptions if s.subscriber is not subscriber))

    def _set_subscriptions(self, subscriptions: tuple[Subscription, ...]) -> None:
        self.subscriptions = subscriptions
        kinds = dict.fromkeys(kind for s in subscriptions for kind in s.kinds)
        self._by_kind = {kind: tuple(s for s in subscriptions if kind in s.kinds) for kind in kinds}
        for source in self.sources:
            source.demand_changed()

    def _evaluate(self, batches: Iterable[Any], name: str | None = "testing", **options: Any) -> None:
        if len(self.sources) != 1:
            raise ConfigError(f"a subscriber can evaluate the model of one exporter, this bus has {len(self.sources)}")
        self.sources[0].evaluate(batches, name, **options)

    def attach(self, source: Source, log_dir: str | Path | None) -> None:
        """Let an exporter publish here; refuse a second log directory."""
        if log_dir is not None:
            if self.log_dir is not None and Path(log_dir) != Path(self.log_dir):
                raise ConfigError(
                    f"bus {self.name!r} writes to {str(self.log_dir)!r} already, not to {str(log_dir)!r}; "
                    "close() the exporter that opened it, or give this one a message_bus of its own"
                )
            check_log_dir(log_dir)
            self.log_dir = log_dir
        self.sources = (*self.sources, source)

    def detach(self, source: Source) -> None:
        """Let an exporter go; with the last one the run is closed and every subscriber unregistered."""
        self.sources = tuple(s for s in self.sources if s is not source)
        if not self.sources:
            self.close()

    # -- what is carried ------------------------------------------------------------------------------------------

    def post(self, item: Message | Finished) -> None:
        """Queue an event, or the rows of a step, behind everything before it."""
        self._queue.append(item)

    def drain(self, wait: bool = False) -> None:
        """Deliver, in order, what has arrived; with `wait`, everything."""
        if self._draining:  # a subscriber that evaluates the model in compute: what it makes waits its turn
            return
        self._draining = True
        try:
            with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 of a row is NaN, without a word
                while self._queue:
                    item = self._queue[0]
                    if not (wait or isinstance(item, Message) or item.arrived()):
                        return
                    self._deliver(self._queue.popleft())
        except Exception as error:
            self.error_guard.report_internal("delivery", error)
        finally:
            self._draining = False

    def _deliver(self, item: Message | Finished) -> None:
        if isinstance(item, Message):
            self.publish(item)
        else:
            item.deliver(self)

    def commit(self, step: int) -> None:
        """Mark the end of a step for the backends."""
        if self._run is not None:
            self._run.commit(step)

    def is_wanted(self, kind: str) -> bool:
        """Whether anybody subscribed to a kind."""
        return kind in self._by_kind

    def publish(self, message: Message) -> None:
        """Deliver an event or a result to everyone who subscribed to it."""
        for subscription in self._by_kind.get(message.kind, ()):
            if subscription.takes(message):
                self.error_guard.call(subscription, "compute", subscription.deliver, message)

    # -- where values go ------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """The open run; ``None`` before the first value."""
        return self._run

    def show(self, series: Series, value: Any, step: int, backends: tuple[Any, ...]) -> None:
        """Send a value to backends; the run is opened by the first."""
        if self._run is None and not self.is_silent:
            self._run = Run(self.log_dir or "run", self.network)
        if self._run is not None:
            self._run.show(series, value, step, backends)

    def close(self) -> None:
        """Deliver what waits, close the run, and unregister every subscriber."""
        self.drain(wait=True)
        for subscription in self.subscriptions:
            subscription.subscriber._bus = None
        self._set_subscriptions(())
        run, self._run = self._run, None
        if run is not None:
            run.close()
        self.log_dir = None


@cache
def get_default_bus() -> MessageBus:
    """Return the bus that exporters use unless they are given one."""
    return MessageBus("default")
