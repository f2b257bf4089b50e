"""Delivers the measurements of a finished step to the subscribers."""

from dataclasses import dataclass, field, replace

from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.early_results import EarlyResults
from ikkuna.metrics.messages.batch import MessageBatch
from ikkuna.metrics.messages.bundle import MessageBundle
from ikkuna.metrics.messages.message import Message, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics.statistics import HISTOGRAMS
from ikkuna.numerics.statistics.record import Records
from ikkuna.numerics.statistics.table import Values
from ikkuna.observation.rows.observer import StepObserver
from ikkuna.observation.rows.rows import Rows
from ikkuna.observation.rows.selection import Selection

__all__ = ["Event", "Finished", "Unsampled"]


_Early = dict[Registered, EarlyResults]


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the whole network, such as the end of an epoch.

    Parameters
    ----------
    message : NetworkMessage
        Its message.
    early : dict
        The results of subscribers that have evaluated the model already.
    """

    message: NetworkMessage
    early: _Early = field(default_factory=dict)

    def evaluate(self, bus: MessageBus) -> None:
        """Let subscribers evaluate the model now, before training changes it; their results are delivered with the event."""
        bus.evaluate_early(self.message, self.early)

    @property
    def stamp(self) -> Stamp:
        """The step before the event."""
        return self.message.stamp

    def arrived(self) -> bool:
        """Return ``True``."""
        return True

    def deliver(self, bus: MessageBus) -> None:
        """Deliver the event."""
        bus.publish(self.message, self.early)

    def abandon(self, bus: MessageBus) -> None:
        """Do nothing."""


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
    early : dict
        The results of subscribers that have evaluated the model already.
    """

    rows: Rows
    event: NetworkMessage | None
    observer: StepObserver | None = None
    early: _Early = field(default_factory=dict)

    def evaluate(self, bus: MessageBus) -> None:
        """Let subscribers evaluate the model now, before training changes it; their results are delivered with the event."""
        if self.event is not None:
            bus.evaluate_early(self.event, self.early)

    def arrived(self) -> bool:
        """Return whether all measurements have reached the host."""
        return self.rows.arrived()

    def deliver(self, bus: MessageBus) -> None:
        """Deliver the measurements to one subscriber after the other, then the event, then the end of the step."""
        rows, observer = self.rows, self.observer
        rows.complete()
        if observer is None or self.event is None:
            self._deliver(bus)
            return
        self.event.data["learning_rates"] = rows.rates
        observer.rows_complete(rows, self.event)
        try:
            self._deliver(bus)
        finally:
            if not bus.queue.late:
                observer.step_delivered(rows.stamp)

    def _deliver(self, bus: MessageBus) -> None:
        rows = self.rows
        if rows.plan.subscriptions:
            _Delivery(rows, bus).deliver_all()
        if self.event is not None:
            self.event.skipped = rows.skipped
            self.event.data["learning_rates"] = rows.rates
            bus.publish(self.event, {} if rows.skipped else self.early)
        if bus.queue.late:  # results of this step that are being computed
            bus.queue.late.append(_End(self))
        else:
            self.end(bus)

    def end(self, bus: MessageBus) -> None:
        """Deliver the end of the step, after all of its results."""
        rows = self.rows
        for registered in bus.registered:
            if not registered.finishes or (rows.skipped and not registered.subscriber.sees_skipped):
                continue
            if registered.samples(rows.stamp):
                bus.error_guard.call(registered, "finish", registered.subscriber.finish, rows.stamp)
        for registered in bus.registered:
            if registered.subscription.is_joined:
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


@dataclass(frozen=True, slots=True)
class Unsampled:
    """The end of a step that no subscriber samples.

    Parameters
    ----------
    stamp : Stamp
        The step.
    """

    stamp: Stamp

    def arrived(self) -> bool:
        """Return ``True``."""
        return True

    def deliver(self, bus: MessageBus) -> None:
        """Pass the end of the step on to the backends."""
        bus.commit(self.stamp.global_step)

    def abandon(self, bus: MessageBus) -> None:
        """Do nothing."""


class _Delivery:
    """Delivers the rows of one step.

    Parameters
    ----------
    rows : Rows
        The complete measurements.
    bus : MessageBus
        Handles errors and results.
    """

    def __init__(self, rows: Rows, bus: MessageBus) -> None:
        self._rows, self._bus = rows, bus
        self._has_elements = rows.has_elements()
        self._is_measured = self._has_elements.copy()
        self._is_measured[list(rows.measured)] = True
        self._values: dict[Selection, Values] = {}
        self._records: dict[tuple[Selection, frozenset[str], bool], Records] = {}
        self._messages: dict[int, Message] = {}

    def deliver_all(self) -> None:
        """Deliver the rows to one subscriber after the other."""
        rows = self._rows
        for registered in rows.plan.subscriptions:
            if not registered.disabled and (not rows.skipped or registered.subscriber.sees_skipped):
                self._deliver(registered)

    def _deliver(self, registered: Registered) -> None:
        """Deliver what a subscriber takes: at once if it takes batches, otherwise row by row."""
        rows = self._rows
        if registered in rows.together:
            messages = {kind: NetworkMessage(rows.stamp, kind) for kind in registered.kinds}
            bundle = MessageBundle(messages, rows.together[registered])
            self._bus.error_guard.call(registered, "compute", registered.deliver, bundle)
        elif registered.takes_batches and registered not in rows.plan.measuring:
            for selection in rows.selections.of(registered):
                if (measured := selection.measured(self._has_elements)) is not None:
                    self._bus.deliver_batch(registered, self._batch(registered, measured))
        elif registered.fields or registered.subscriber.measures:
            self._deliver_rows(registered)

    def _batch(self, registered: Registered, selection: Selection) -> MessageBatch:
        finite_only = registered.subscriber.finite_only
        key = selection, registered.fields, finite_only
        if key not in self._records:
            if selection not in self._values:
                self._values[selection] = self._rows.values[selection.rows]
            counts = {name: self._rows.counts(selection.rows, name) for name in registered.fields & HISTOGRAMS}
            self._records[key] = Records(self._values[selection], registered.fields, finite_only, counts)
        return MessageBatch(self._rows.stamp, selection.kind, selection.names, self._records[key])

    def _deliver_rows(self, registered: Registered) -> None:
        call = self._bus.error_guard.call
        is_joined, subscriber = registered.subscription.is_joined, registered.subscriber
        for row in self._rows_of(registered):
            message = self._message(row, registered)
            if message is None:
                continue
            if registered.disabled:
                return
            call(registered, "compute", registered.deliver if is_joined else subscriber.compute, message)

    def _rows_of(self, registered: Registered) -> list[int]:
        """Return the rows that may have something for a subscriber, in order."""
        found: list[int] = []
        for selection in self._rows.selections.of(registered):
            measured = selection.measured(self._is_measured)
            found += [] if measured is None else measured.rows.tolist()
        return sorted(found) if len(registered.kinds) > 1 else found

    def _message(self, row: int, registered: Registered) -> Message | None:
        """Return the message of a row; one object serves all subscribers that need nothing else than shared statistics."""
        rows = self._rows
        data = rows.measured[row].get(registered) if row in rows.measured else None
        shared = self._messages.get(row)
        if shared is None:
            shared = self._messages[row] = rows.message(row, record=rows.record(row, rows.fields(row)))
        record = shared.record if registered.fields else None
        if record is None and data is None:
            return None
        if record is not None and registered.subscriber.finite_only:
            record = replace(record, finite_only=True)
        return shared if data is None and record is shared.record else rows.message(row, data, record)


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a step, which is delivered after the results that its subscribers wait for."""

    finished: Finished

    @property
    def stamp(self) -> Stamp:
        return self.finished.stamp

    def arrived(self) -> bool:
        return True

    def deliver(self, bus: MessageBus) -> None:
        try:
            self.finished.end(bus)
        finally:
            if self.finished.observer is not None:
                self.finished.observer.step_delivered(self.stamp)

    def abandon(self, bus: MessageBus) -> None:
        self.finished.abandon(bus)
