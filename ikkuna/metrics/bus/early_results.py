"""Results of a subscriber that computes them before the messages of their step are delivered."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from ikkuna.metrics.messages.batch import MessageBatch
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.subscriber.base import Host, Subscriber
from ikkuna.store.values import ModuleEntry
from ikkuna.support.device_thread import Pending
from ikkuna.support.modules import NamedModule

__all__ = ["EarlyResults"]


class EarlyResults:
    """The host of a subscriber while it evaluates the model; keeps what the subscriber emits, and passes it on later.

    Parameters
    ----------
    host : Host
        The bus.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._calls: list[Callable[[], object]] = []

    def deliver(self) -> None:
        """Pass everything on to the bus, in order."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The observed modules."""
        return self._host.modules

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that own parameters of the observed models."""
        return self._host.optimizers

    @property
    def network(self) -> tuple[ModuleEntry, ...]:
        """Names, classes and parameter shapes of the observed modules."""
        return self._host.network

    def register_subscriber(self, subscriber: Subscriber) -> object:
        """Register a subscriber."""
        return self._host.register_subscriber(subscriber)

    def is_wanted(self, kind: str) -> bool:
        """Return whether a subscriber takes messages of this kind."""
        return self._host.is_wanted(kind)

    def publish(self, message: Message) -> None:
        """Keep a message."""
        self._calls.append(partial(self._host.publish, message))

    def show(self, *arguments: Any) -> None:
        """Keep a value."""
        self._calls.append(partial(self._host.show, *arguments))

    def publish_batch(self, batch: MessageBatch) -> None:
        """Keep the messages of a batch."""
        self._calls.append(partial(self._host.publish_batch, batch))

    def show_group(self, *arguments: Any) -> None:
        """Keep a number of each series of a group."""
        self._calls.append(partial(self._host.show_group, *arguments))

    def later(
        self, subscriber: Subscriber, message: Message, pending: Pending[Any], then: Callable[[Pending[Any]], None]
    ) -> None:
        """Keep a result to come."""
        self._calls.append(partial(self._host.later, subscriber, message, pending, then))

    def drop_late(self, subscriber: Subscriber) -> None:
        """Count a result that is not computed."""
        self._host.drop_late(subscriber)
