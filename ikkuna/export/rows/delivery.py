"""Delivers the measurements of a finished step to the subscribers."""

from dataclasses import dataclass, replace

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.message import Message, NetworkMessage
from ikkuna.export.rows.rows import Entry, Rows

__all__ = ["Finished"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A step or another pass that is over.

    Parameters
    ----------
    rows : what was measured in it
    event : the message that says so, for a step of training
    """

    rows: Rows
    event: NetworkMessage | None

    def arrived(self) -> bool:
        """Whether all measurements have reached the host."""
        return self.rows.arrived()

    def deliver(self, bus: MessageBus) -> None:
        """Deliver every row, then the event, then the end of the step."""
        rows = self.rows
        for entry in rows.unpack():
            _deliver_entry(bus, entry, rows)
            rows.keep(entry)
        if self.event is not None:
            self.event.skipped = rows.skipped
            bus.publish(self.event)
        for subscription in bus.registered:
            if subscription.samples(rows.stamp) and (not rows.skipped or subscription.subscriber.sees_skipped):
                bus.error_guard.call(subscription, "finish", subscription.subscriber.finish, rows.stamp)
        for subscription in bus.registered:
            subscription.drop_incomplete(rows.stamp)
        bus.commit(rows.stamp.global_step)


def _deliver_entry(bus: MessageBus, entry: Entry, rows: Rows) -> None:
    for subscription in entry.task.subscriptions:
        subscriber = subscription.subscriber
        if subscription.disabled or (rows.skipped and not subscriber.sees_skipped):
            continue
        row = entry.measured.get(subscription) if entry.measured is not None else None
        record = entry.record if subscriber.fields and entry.record is not None and entry.record.n else None
        if record is None and row is None:
            continue
        if record is not None and subscriber.finite_only:
            record = replace(record, finite_only=True)
        data = None if row is None else row.numpy()
        message: Message | MessageBundle = entry.message(rows.stamp, data, record)
        if subscription.together:
            message = MessageBundle({kind: NetworkMessage(rows.stamp, kind) for kind in subscription.kinds}, data)
        bus.error_guard.call(subscription, "compute", subscription.deliver, message)
