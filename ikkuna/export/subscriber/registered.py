"""A subscriber that is registered on a bus, and its running state."""

from typing import Any

from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.kinds import MEASURED_TOGETHER
from ikkuna.export.messages.message import Message
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.subscriber.base import Subscriber
from ikkuna.failures import FailureCounter

__all__ = ["Registered"]


class Registered:
    """A subscriber that is registered on a bus, and its running state.

    Parameters
    ----------
    subscriber : Subscriber
        The registered subscriber.

    Attributes
    ----------
    subscription : Subscription
        The messages that the subscriber asks for.
    together : bool
        Whether the subscriber measures the tensors of its kinds in one call, as a `MessageBundle`.
    disabled : bool
        Whether the subscriber is no longer called.
    failures : FailureCounter
        Consecutive failures by stage: ``"measure"``, ``"compute"`` and so on.
    seconds : float
        Time spent in the subscriber's own code.
    dropped : int
        Number of incomplete bundles that were dropped.
    """

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.subscription = subscriber.subscription
        self.kinds = self.subscription.kinds
        self.matches = self.subscription.matches
        self.together = (
            self.subscription.is_joined and subscriber.measures and set(self.kinds) <= set(MEASURED_TOGETHER)
        )
        self.disabled = False
        self.failures = FailureCounter()
        self.seconds = 0.0
        self.dropped = 0
        self._waiting: dict[tuple[object, ...], dict[str, Message]] = {}

    @property
    def label(self) -> str:
        """Class and kinds, such as ``NormSubscriber(weights)``; never the subscriber's own ``repr``, which can raise."""
        return f"{type(self.subscriber).__name__}({', '.join(self.kinds)})"

    def samples(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled."""
        return not self.disabled and self.subscription.samples(stamp)

    def takes(self, message: Message) -> bool:
        """Return whether this message is delivered."""
        return not self.disabled and self.subscription.takes(message)

    def deliver(self, message: Message | MessageBundle) -> None:
        """Call ``compute`` with a message; messages of a joined subscription wait until their bundle is complete."""
        if isinstance(message, MessageBundle) or not self.subscription.is_joined:
            self.subscriber.compute(message)
            return
        waiting = self._waiting.setdefault(message.identity, {})
        waiting[message.kind] = message
        if len(waiting) == len(self.kinds):
            del self._waiting[message.identity]
            self.subscriber.compute(MessageBundle({kind: waiting[kind] for kind in self.kinds}))

    def drop_incomplete(self, stamp: Stamp) -> None:
        """Drop and count the incomplete bundles of a step that is over, and those that exceptions have left of earlier ones."""
        incomplete = [identity for identity in self._waiting if _is_over(identity[0], stamp)]
        for identity in incomplete:
            del self._waiting[identity]
        self.dropped += len(incomplete)


def _is_over(stamp: Any, last: Stamp) -> bool:
    return bool(stamp.pass_name == last.pass_name and stamp.global_step <= last.global_step)
