"""Carries messages from whoever publishes to whoever subscribed, and owns the run that values are shown in."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ikkuna.errors import ConfigError, ConfigTypeError, UnknownKindError
from ikkuna.export.faults import Faults
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.kinds import BUILT_IN, EVENT_KINDS, MODULE_KINDS
from ikkuna.export.messages.message import Message
from ikkuna.export.rows import Entry, Rows
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.export.subscriber.subscription import Subscription
from ikkuna.visualization.backend import Series
from ikkuna.visualization.run import Run
from ikkuna.visualization.run_directory import check_log_dir

__all__ = ["Handle", "MessageBus", "Source", "get_default_bus"]

log = logging.getLogger("ikkuna")


class Source(Protocol):
    """What publishes on a bus: an exporter."""

    @property
    def module_names(self) -> frozenset[str]:
        """Names of the modules it looks at."""

    def close(self) -> None:
        """Stop publishing."""


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
    faults : Faults
        What went wrong.
    """

    def __init__(self, name: str = "bus", log_dir: str | Path | None = None) -> None:
        self.name = name
        self.log_dir = log_dir
        self.subscriptions: tuple[Subscription, ...] = ()
        self.sources: tuple[Source, ...] = ()
        self.faults = Faults()
        self._queue: deque[Message | tuple[Rows, Callable[[Entry], None]]] = deque()
        self._run: Run | None = None

    # -- who takes part -------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that can be subscribed to: the built-in ones and what subscribers announced."""
        announced = (kind for s in self.subscriptions for kind in s.subscriber.publishes)
        return tuple(dict.fromkeys((*BUILT_IN, *announced)))

    def register_subscriber(self, subscriber: Subscriber) -> Handle:
        """Let `subscriber` take part from the next step on; return what undoes it.

        Raises
        ------
        ConfigError
            For a kind nobody publishes, a result somebody else publishes already, a circle of results, or a class that cannot work.
            The bus is unchanged then.
        """
        if not isinstance(subscriber, Subscriber):
            raise ConfigTypeError(f"register_subscriber() needs a Subscriber, got {type(subscriber).__name__}")
        if subscriber._bus is not None:
            raise ConfigError(f"{subscriber!r} is registered already; make another one for a second registration")
        subscriber.check()
        self._check_kinds(subscriber)
        self._check_publications(subscriber)
        self._check_modules(subscriber)
        Run(self.log_dir or "run").prepare(subscriber.backends)
        subscriber._bus = self
        self.subscriptions = (*self.subscriptions, subscriber.subscription)
        return Handle(lambda: self._unregister(subscriber))

    def _unregister(self, subscriber: Subscriber) -> None:
        subscriber._bus = None
        self.subscriptions = tuple(s for s in self.subscriptions if s.subscriber is not subscriber)

    def _check_kinds(self, subscriber: Subscriber) -> None:
        for kind in subscriber.kinds:
            if kind not in self.kinds:
                near = get_close_matches(kind, self.kinds, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ";"
                raise UnknownKindError(f"unknown kind {kind!r}{hint} known: {', '.join(self.kinds)}")
            is_event, is_derived = kind in EVENT_KINDS, kind not in BUILT_IN
            if is_derived and not subscriber.derived:
                raise ConfigError(
                    f"{subscriber!r} measures tensors, but {kind!r} is a result and carries a float; "
                    "a subscriber that can use one says so with `derived = True`"
                )
            if not (is_event or is_derived or subscriber.measures or subscriber.fields):
                raise ConfigError(f"{subscriber!r} needs a `measure` or `fields` to take {kind!r}, it has neither")
        scopes = {self._is_of_module(kind) for kind in subscriber.kinds}
        if len(scopes) > 1 and len(subscriber.kinds) > 1 and hasattr(subscriber.subscription, "_waiting"):
            raise ConfigError(f"{subscriber!r} joins kinds of modules with kinds of the network, which never meet")

    def _is_of_module(self, kind: str) -> bool:
        if kind in BUILT_IN:
            return kind in MODULE_KINDS
        maker = next(s for s in self.subscriptions if kind in s.subscriber.publishes)
        return self._is_of_module(maker.kinds[0])

    def _check_publications(self, subscriber: Subscriber) -> None:
        if path := self._circle(subscriber):
            raise ConfigError(f"publication cycle {' -> '.join(path)}")
        for kind in subscriber.publishes:
            if kind in BUILT_IN:
                raise ConfigError(
                    f"{subscriber!r} cannot publish {kind!r}, which is a built-in kind; choose another with publishes="
                )
            for other in self.subscriptions:
                if kind in other.subscriber.publishes and self._overlap(subscriber.subscription, other):
                    raise ConfigError(
                        f"{kind!r} is published already, by {other.subscriber!r}, for the same pass and modules; "
                        "close() its exporter, give other modules=, or another name with publishes="
                    )

    def _overlap(self, one: Subscription, other: Subscription) -> bool:
        if one.tag != other.tag and None not in (one.tag, other.tag):
            return False
        if one.modules is None or other.modules is None or one.modules == other.modules:
            return True
        return any(one.matches(name) and other.matches(name) for source in self.sources for name in source.module_names)

    def _circle(self, subscriber: Subscriber) -> list[str]:
        leads: dict[str, set[str]] = {}
        for s in (*(s.subscriber for s in self.subscriptions), subscriber):
            for kind in s.kinds:
                leads.setdefault(kind, set()).update(s.publishes)

        def search(kind: str, path: list[str]) -> list[str]:
            if kind in path:
                return [*path[path.index(kind) :], kind]
            found = (search(after, [*path, kind]) for after in sorted(leads.get(kind, ())))
            return next((path for path in found if path), [])

        return next((path for kind in subscriber.publishes if (path := search(kind, []))), [])

    def _check_modules(self, subscriber: Subscriber) -> None:
        names = {name for source in self.sources for name in source.module_names}
        wants_modules = any(kind in MODULE_KINDS for kind in subscriber.kinds)
        if names and wants_modules and not any(map(subscriber.subscription.matches, names)):
            some = ", ".join(sorted(names)[:8])
            raise ConfigError(
                f"modules={subscriber.subscription.modules!r} matches none of the {len(names)} modules ({some}, …)"
            )

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

    def post(self, item: "Message | tuple[Rows, Callable[[Entry], None]]") -> None:
        """Queue an event, or the rows of a step, behind everything before it."""
        self._queue.append(item)

    def drain(self, wait: bool = False) -> None:
        """Deliver, in order, what has arrived; with `wait`, everything."""
        while self._queue:
            item = self._queue[0]
            if not isinstance(item, Message) and not wait and not item[0].arrived():
                return
            self._queue.popleft()
            try:
                with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 of a row is NaN, without a word
                    self._deliver(item)
            except Exception as error:
                self.faults.own("delivery", error)

    def _deliver(self, item: "Message | tuple[Rows, Callable[[Entry], None]]") -> None:
        if isinstance(item, Message):
            self.publish(item)
            return
        rows, done = item
        for entry in rows.unpack():
            self._deliver_entry(entry)
            done(entry)
        for subscription in self.subscriptions:
            subscription.finish(rows.stamp)
        if self._run is not None:
            self._run.commit(rows.stamp.global_step)

    def _deliver_entry(self, entry: Entry) -> None:
        task = entry.task
        for subscription in self.subscriptions:
            is_reader = subscription in task.readers and entry.record is not None and entry.record.n
            row = entry.measured.get(subscription)
            if (not is_reader and row is None) or subscription.disabled:
                continue
            record = (
                replace(entry.record, finite_only=subscription.subscriber.finite_only)
                if is_reader and entry.record
                else None
            )
            data = None if row is None else row.numpy()
            message: Message | MessageBundle = replace(entry.message, record=record, data=data)
            if subscription.together:
                kinds = {kind: replace(entry.message, kind=kind, data=None) for kind in subscription.kinds}
                message = MessageBundle(kinds, data)
            self.faults.call(subscription, "compute", subscription.deliver, message)

    def publish(self, message: Message) -> None:
        """Deliver an event or a result to everyone who subscribed to it."""
        for subscription in self.subscriptions:
            if subscription.takes(message):
                self.faults.call(subscription, "compute", subscription.deliver, message)

    # -- where values go ------------------------------------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """The open run; ``None`` before the first value."""
        return self._run

    def show(self, series: Series, value: Any, step: int, backends: tuple[Any, ...]) -> None:
        """Send a value to backends; the run is opened by the first."""
        if self._run is None:
            self._run = Run(self.log_dir or "run")
        self._run.show(series, value, step, backends)

    def close(self) -> None:
        """Deliver what waits, close the run, and unregister every subscriber."""
        self.drain(wait=True)
        for subscription in self.subscriptions:
            subscription.subscriber._bus = None
        self.subscriptions = ()
        run, self._run = self._run, None
        if run is not None:
            run.close()
        self.log_dir = None


@cache
def get_default_bus() -> MessageBus:
    """Return the bus that exporters use unless they are given one."""
    return MessageBus("default")
