"""Events and measurements in the order of the training loop, until they are delivered."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import numpy as np

from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.support.failures import FailureCounter, log

__all__ = ["DeliveryQueue", "Measurements", "Publisher"]


class Publisher(Protocol):
    """The bus to which a queue delivers."""

    def publish(self, message: Message, /) -> None:
        """Deliver an event to its subscribers."""


Bus = TypeVar("Bus", bound=Publisher)
Receiver = TypeVar("Receiver", contravariant=True)


class Measurements(Protocol[Receiver]):
    """The measurements of a finished step or pass."""

    @property
    def stamp(self) -> Stamp:
        """The step."""

    def arrived(self) -> bool:
        """Return whether all measurements have been copied to the host."""

    def deliver(self, bus: Receiver, /) -> None:
        """Deliver every measurement to its subscribers."""

    def abandon(self, bus: Receiver, /) -> None:
        """Make subscribers forget what they have received, because an exception has interrupted the delivery."""


class DeliveryQueue(Generic[Bus]):
    """A queue whose items are delivered in order, each as soon as it and all earlier ones have arrived.

    Parameters
    ----------
    error_guard : ErrorGuard
        Handles errors of the delivery itself.

    Attributes
    ----------
    late : list of Measurements
        Parts of the item that is being delivered, which are delivered later, before the items that follow.
    """

    def __init__(self, error_guard: ErrorGuard) -> None:
        self._error_guard = error_guard
        self._items: deque[Message | Measurements[Bus]] = deque()
        self.late: list[Measurements[Bus]] = []
        self._begun: Message | Measurements[Bus] | None = None
        self._is_held = False
        self._interruptions = 0

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: Message | Measurements[Bus]) -> None:
        """Append an event, or the measurements of a step."""
        self._items.append(item)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let all items wait in the queue, because a subscriber is called that may evaluate the model."""
        earlier, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = earlier

    def drain(self, bus: Bus, wait: bool = False) -> None:
        """Deliver the items in order, up to the first that has not arrived; with `wait`, all of them."""
        if self._is_held or not self._items:  # a subscriber evaluates the model in compute; its items stay in the queue
            return
        try:
            try:
                self._is_held = True
                with np.errstate(divide="ignore", invalid="ignore"):  # 0/0 of rows is NaN without a warning
                    while self._items and self._deliver_first(bus, wait):
                        pass
            finally:
                self._is_held = False
        except BaseException:  # may have come before the line above
            self._is_held = False
            raise

    def _deliver_first(self, bus: Bus, wait: bool) -> bool:
        """Deliver the first item and return whether it had arrived.

        The item is removed afterwards.  If it is still there at the next call, an exception that belongs to the user has
        interrupted its delivery, and what remains of it is lost.
        """
        item = self._items[0]
        if item is self._begun:
            self._items.popleft()
            self.late = []
            self._abandon(item, bus)
            return True
        try:
            if isinstance(item, Message):
                self._begun = item
                bus.publish(item)
            elif wait or item.arrived():
                self._begun = item
                item.deliver(bus)
            else:
                return False
        except Exception as error:
            self._error_guard.report_internal("delivery", error)
        self._items.popleft()
        self._begun = None  # it refers to subscribers
        self._items.extendleft(reversed(self.late))
        self.late = []
        return True

    def _abandon(self, item: Message | Measurements[Bus], bus: Bus) -> None:
        self._interruptions += 1
        if FailureCounter.is_logged(self._interruptions):
            step = item.stamp.global_step
            log.warning("an exception has interrupted the delivery of step %d; some of its values are missing", step)
        if isinstance(item, Message):
            return
        try:
            item.abandon(bus)
        except Exception as error:
            self._error_guard.report_internal("delivery", error)
