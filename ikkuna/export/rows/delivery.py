"""Delivers the measurements of a finished step to the subscribers."""

from dataclasses import dataclass, replace
from typing import Any

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.message import NetworkMessage
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.rows.observer import StepObserver
from ikkuna.export.rows.rows import Rows
from ikkuna.export.subscriber.registered import Registered

__all__ = ["Finished"]

_NOTHING: dict[Registered, Any] = {}


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished step, or another finished pass.

    Parameters
    ----------
    rows : Rows
        Its measurements.
    event : NetworkMessage or None
        The message ``batch_finished`` of a training step.
    observer : StepObserver, optional
        Observes training steps beside the subscribers.
    """

    rows: Rows
    event: NetworkMessage | None
    observer: StepObserver | None = None

    def arrived(self) -> bool:
        """Return whether all measurements have reached the host."""
        return self.rows.arrived()

    def deliver(self, bus: MessageBus) -> None:
        """Deliver every row, then the event, then the end of the step."""
        rows, observer = self.rows, self.observer
        rows.complete()
        if observer is None or self.event is None:
            self._deliver(bus)
            return
        observer.rows_complete(rows, self.event)
        try:
            self._deliver(bus)
        finally:
            observer.step_delivered(rows.stamp)

    def _deliver(self, bus: MessageBus) -> None:
        rows = self.rows
        self._deliver_rows(bus)
        for registered, data in rows.together.items():
            if not registered.disabled and self._is_seen_by(registered):
                messages = {kind: NetworkMessage(rows.stamp, kind) for kind in registered.kinds}
                bus.error_guard.call(registered, "compute", registered.deliver, MessageBundle(messages, data))
        if self.event is not None:
            self.event.skipped = rows.skipped
            bus.publish(self.event)
        for registered in bus.registered:
            if registered.samples(rows.stamp) and self._is_seen_by(registered):
                bus.error_guard.call(registered, "finish", registered.subscriber.finish, rows.stamp)
        for registered in bus.registered:
            registered.drop_incomplete(rows.stamp)
        bus.commit(rows.stamp.global_step)

    @property
    def stamp(self) -> Stamp:
        """The step."""
        return self.rows.stamp

    def abandon(self, bus: MessageBus) -> None:
        """Make subscribers forget what they have received of the step."""
        rows = self.rows
        if rows.rank_merge is not None:
            rows.rank_merge.abandon()
        for registered in bus.registered:
            if registered.samples(rows.stamp):
                bus.error_guard.call(registered, "abandon", registered.subscriber.abandon, rows.stamp)
            registered.drop_incomplete(rows.stamp)

    def _is_seen_by(self, registered: Registered) -> bool:
        return not self.rows.skipped or registered.subscriber.sees_skipped

    def _deliver_rows(self, bus: MessageBus) -> None:
        rows, keys, call = self.rows, self.rows.keys, bus.error_guard.call
        for row in rows.measured_rows():
            site, path = keys[row]
            if (task := rows.plan.task(site.kind, site.module)) is None:
                continue
            shared, measured = rows.record(row, task.fields), rows.measured.get(row, _NOTHING)
            message = site.message(rows.stamp, path, None, shared)  # of all subscribers that need nothing else
            for registered in task.subscriptions:
                subscriber = registered.subscriber
                record, data = shared if subscriber.fields else None, measured.get(registered)
                if (record is None and data is None) or registered.disabled:
                    continue
                if rows.skipped and not subscriber.sees_skipped:
                    continue
                if record is not None and subscriber.finite_only:
                    record = replace(record, finite_only=True)
                is_plain = data is None and record is shared
                own = message if is_plain else site.message(rows.stamp, path, data, record)
                compute = registered.deliver if registered.subscription.is_joined else subscriber.compute
                call(registered, "compute", compute, own)
