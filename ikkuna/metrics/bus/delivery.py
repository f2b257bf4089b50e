"""The way of a step's values: from its closed rows to the subscribers, and from these to the backends of the run.

The exporter appends finished steps and events to the queue of a `Delivery`, which is drained at the boundaries between steps:

1. `Finished.deliver` takes the batches of each subscriber from the rows of the step, one `MessageBatch` for each kind.
2. `Delivery.deliver` calls ``compute_batch`` with a batch, or ``compute`` with each of its messages, through the error guard.
3. `Delivery.pass_on` keeps the arrays that the subscriber has emitted: for the subscribers of their kind, which receive them
   together with what they take of the step themselves, and for the backends.
4. `Finished.end` calls ``finish`` and drops joined messages that lack a partner.  `Delivery.commit` passes all arrays of the step
   to the run at once; each backend encodes them and gives them to its writer thread.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np

from ikkuna.backends.backend import AddedValues
from ikkuna.backends.run import Run
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.messages.batch import MeasuredStep, MessageBatch, StepLosses
from ikkuna.metrics.messages.kinds import EVENT_KINDS
from ikkuna.metrics.messages.message import Message, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.host import Later, Result
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.support.failures import FailureCounter, log

_EVENTS = frozenset(EVENT_KINDS)
_Early = dict[Registered, Sequence[Result | Later]]
_NO_STEP: tuple[Stamp | None, frozenset[Registered]] = None, frozenset()
_NONE: Mapping[Registered, Sequence[Result | Later]] = {}


class Measurements(Protocol):
    """The measurements of a step, see `ikkuna.observation.rows.rows.Rows`."""

    stamp: Stamp
    subscriptions: Sequence[Registered]
    sampled: frozenset[Registered]
    skipped: bool
    rates: dict[str, Any]

    def arrived(self) -> bool:
        """Return whether all measurements have reached the host."""

    def complete(self) -> None:
        """Merge the measurements of all devices and ranks, waiting if necessary."""

    def taken(self) -> Sequence[tuple[Registered, Sequence[MessageBatch], MeasuredStep | None]]:
        """Return what each subscriber takes: one batch for each kind, or a step, of which batches are made when it reads them."""

    def abandon(self) -> None:
        """Forget the step, which is not delivered."""


class StepObserver:
    """Observes the steps of one exporter; its methods do nothing by default.

    They raise nothing but exceptions that belong to the user.  Plans and rows are those of `ikkuna.observation.rows`.
    """

    needs_every_step = True
    """Whether `step_opened`, `model_called` and `loss_called` are needed of steps of which subscribers need the loss alone."""

    def step_opened(self, stamp: Stamp, plan: Any) -> None:
        """Handle the beginning of a step, before the first forward."""

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle what the model is called with in a step, borrowed."""

    def loss_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle what the loss module is called with in a step, borrowed."""

    def step_passed(self, stamp: Stamp) -> None:
        """Handle the end of a step that no subscriber samples, so that it has no rows."""

    def steps_passed(self, block: StepLosses) -> None:
        """Handle steps of which subscribers need the loss alone."""

    def rows_complete(self, rows: Any, event: NetworkMessage) -> None:
        """Handle the complete measurements of a training step, before they are delivered to subscribers."""

    def step_delivered(self, stamp: Stamp) -> None:
        """Handle the end of the delivery, also after an exception."""


class Delivery:
    """Delivers messages to subscribers in the order of their registration, and their results to the run.

    Parameters
    ----------
    error_guard : ErrorGuard
        Calls the subscribers and handles their errors.

    Attributes
    ----------
    registered : tuple of Registered
        The registered subscribers in the order of registration.
    error_guard : ErrorGuard
        Handles the errors of subscribers and hooks.
    thread : ThreadState
        The state of this thread.
    run : Run or None
        The open run; ``None`` before the first value.
    queue : deque of Item
        Events and measurements of steps, which are delivered in order, each as soon as it and all earlier ones have arrived.
    by_kind : dict
        The subscribers that take messages of a kind.
    late : list of Item
        Parts of the item that is being delivered, which are delivered later, before the items that follow.
    step : tuple
        The stamp of the step whose values are delivered, and the subscribers that sample it.
    expected : dict
        By subscriber, the events and results that it receives next.
    added : dict
        By backends and step, the values that the run has not received yet.
    """

    def __init__(self, error_guard: ErrorGuard) -> None:
        self.registered: tuple[Registered, ...] = ()
        self.error_guard, self.thread = error_guard, error_guard.thread
        self.queue: deque[Item] = deque()
        self.late: list[Item] = []
        self._begun: Item | None = None
        self._is_held = False
        self._interruptions = 0
        self.by_kind: dict[str, tuple[Registered, ...]] = {}
        self.run: Run | None = None
        self.step = _NO_STEP
        self.expected: dict[Registered, list[MessageBatch]] = {}
        self.added: dict[tuple[tuple[Hashable, ...], int], tuple[tuple[Any, ...], list[AddedValues]]] = {}

    def open_run(self) -> Run | None:
        """Return the open run, and open one if there is none; ``None`` if another rank writes the run."""
        raise NotImplementedError

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let all items wait in the queue, because a subscriber is called that may evaluate the model."""
        earlier, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = earlier

    def drain(self, wait: bool = False) -> None:
        """Deliver the items in order, up to the first that has not arrived; with `wait`, all of them."""
        if self._is_held or not self.queue:  # a subscriber evaluates the model in compute; its items stay in the queue
            return
        try:
            try:
                self._is_held = True
                with np.errstate(all="ignore"):  # 0/0 of rows is NaN without a warning
                    while self.queue and self._deliver_first(wait):
                        pass
            finally:
                self._is_held = False
        except BaseException:  # may have come before the line above
            self._is_held = False
            raise

    def _deliver_first(self, wait: bool) -> bool:
        """Deliver the first item and return whether it had arrived.

        The item is removed afterwards.  If it is still there at the next call, an exception that belongs to the user has
        interrupted its delivery, and what remains of it is lost.
        """
        item = self.queue[0]
        if item is self._begun:
            self.queue.popleft()
            self.late = []
            self._abandon(item)
            return True
        try:
            if not wait and not item.arrived():
                return False
            self._begun = item
            item.deliver(self)
            if self.expected or self.added:
                self.settle()
        except Exception as error:
            self.error_guard.report_internal("delivery", error)
        self.queue.popleft()
        self._begun, self.step = None, _NO_STEP  # they refer to subscribers
        self.queue.extendleft(reversed(self.late))
        self.late = []
        return True

    def _abandon(self, item: "Item") -> None:
        self._interruptions += 1
        if FailureCounter.is_logged(self._interruptions):
            step = item.stamp.global_step
            log.warning("an exception has interrupted the delivery of step %d; some of its values are missing", step)
        try:
            self.expected = {}
            item.abandon(self)
        except Exception as error:
            self.error_guard.report_internal("delivery", error)

    def publish(
        self, messages: Message | MessageBatch, early: Mapping[Registered, Sequence[Result | Later]] = _NONE
    ) -> None:
        """Deliver an event or results to the subscribers of their kind: at once, or as the next ones of a delivery that has begun.

        Parameters
        ----------
        messages : Message or MessageBatch
            The event, or the results.
        early : mapping
            The results of subscribers that have handled the event already.
        """
        self.expect(messages, early)
        self._settle_outside()

    def expect(
        self, messages: Message | MessageBatch, early: Mapping[Registered, Sequence[Result | Later]] = _NONE
    ) -> None:
        """Keep an event or results for the subscribers of their kind, see :meth:`publish`."""
        if (takers := self.by_kind.get(messages.kind)) is None:
            return
        batch = messages if isinstance(messages, MessageBatch) else MessageBatch.of(messages)
        stamp, sampled = self.step
        for registered in takers:
            if registered in early:
                self.pass_on(registered, early[registered])
                continue
            is_sampled = None if batch.stamp is not stamp else registered in sampled
            if (selected := registered.select(batch, is_sampled)) is not None:
                self.expected.setdefault(registered, []).append(selected)

    def deliver(
        self,
        registered: Registered,
        *batches: MessageBatch,
        step: MeasuredStep | None = None,
        early: _Early | None = None,
    ) -> None:
        """Deliver messages to one subscriber, one batch for each kind; those of joined kinds wait for their partners.

        A subscriber that takes whole steps receives these after results of others, which are batches.

        An error in one batch, or in one message if the subscriber takes messages one by one, loses no other.
        Its results are passed on at the end, also after an error; with `early`, they are kept there.
        """
        subscriber, call_each = registered.subscriber, self.error_guard.call_each
        if registered.disabled:
            return
        complete = registered.join(batches) if registered.subscription.is_joined else batches
        if complete and registered.takes_batches:
            call_each(registered, "compute", subscriber.compute_batch, complete)
        elif complete:
            call_each(registered, "compute", subscriber.compute, chain.from_iterable(complete))
        if step is not None:
            call_each(registered, "compute", subscriber.compute_step, (step,))
        if early is not None:
            early[registered] = subscriber.take_results()
        elif subscriber._untaken:
            self.pass_on(registered, subscriber.take_results())

    def deliver_expected(self) -> None:
        """Deliver events and results to the subscribers that take them, in the order of registration.

        A subscriber that takes a message of a circle, such as its own, is disabled: there is one if results are followed by others
        more often than there are subscribers.
        """
        rounds = 0
        while self.expected:
            rounds += 1
            for each in [each for each in self.registered if each in self.expected] or list(self.expected):
                batches = self.expected.pop(each, [])
                if batches and rounds > len(self.registered) + 1:
                    self.error_guard.disable(each, f"taking a circle of messages of the kind {batches[0].kind!r}")
                self.deliver(each, *batches)

    def pass_on(self, registered: Registered, results: Sequence[Result | Later]) -> None:
        """Keep what a subscriber has emitted, in order, for the backends and for the subscribers of its kind."""
        for result in results:
            if isinstance(result, Later):
                self.late.append(_LateResult(registered, result))
                continue
            step = result.stamp.global_step
            if (kept := self.added.get((registered.targets, step))) is None:
                kept = self.added[registered.targets, step] = registered.subscriber.backends, []
            kept[1].append((result.method, result.arguments, registered))
            if result.names is not None and (kind := result.arguments[0].kind) in self.by_kind:
                self.expect(MessageBatch(result.stamp, kind, result.names, data=result.arguments[1]))

    def settle(self) -> None:
        """Deliver the events and results that subscribers take, and pass all values on to the backends."""
        if self.expected:
            try:
                self.thread.is_delivering = True
                self.deliver_expected()
                self.thread.is_delivering = False
            except BaseException:
                self.thread.is_delivering, self.expected = False, {}
                raise
        if self.added:
            kept, self.added = self.added, {}
            for (_, step), (backends, added) in kept.items():
                if added and (run := self.run or self.open_run()) is not None:
                    run.add_all(added, step, backends)

    def _settle_outside(self) -> None:
        """Settle, unless a delivery has begun, which does so at its end."""
        if not (self._is_held or self.thread.is_delivering):
            self.settle()

    def evaluate_early(self, message: Message, into: _Early) -> None:
        """Let subscribers that evaluate the model handle an event now, and keep their results until the event is delivered."""
        batch = MessageBatch.of(message)
        for registered in self.by_kind.get(message.kind, ()):
            takes_events = _EVENTS.issuperset(registered.kinds) and not registered.subscription.is_joined
            if registered.subscriber.needs_model and takes_events and registered.select(batch) is not None:
                with self.hold(), np.errstate(all="ignore"):
                    self.deliver(registered, batch, early=into)

    # -- what a subscriber calls ----------------------------------------------------------------------------------

    def take_results(self, subscriber: Subscriber) -> None:
        """Show and publish what the user lets a subscriber emit by calling it directly."""
        for registered in self.registered:
            if registered.subscriber is subscriber:
                self.pass_on(registered, subscriber.take_results())
        self._settle_outside()

    def drop_late(self, subscriber: Subscriber) -> None:
        """Count a result that is not computed, because earlier ones still are."""
        for registered in self.registered:
            if registered.subscriber is subscriber:
                registered.drop_late()

    def commit(self, step: int) -> None:
        """Pass the values and the end of a step on to the backends."""
        self.settle()
        if self.run is not None:
            self.run.commit(step)


# -- the items of the queue -------------------------------------------------------------------------------------------


@dataclass
class Item:
    """Something that is delivered in the order of the training loop; by itself the end of a step that no subscriber samples.

    Parameters
    ----------
    stamp : Stamp
        The step.
    """

    stamp: Stamp

    def arrived(self) -> bool:
        """Return whether everything has been copied to the host; by default ``True``."""
        return True

    def deliver(self, bus: Delivery) -> None:
        """Deliver it; by default pass the end of the step on to the backends."""
        bus.commit(self.stamp.global_step)

    def abandon(self, bus: Delivery) -> None:
        """Make subscribers forget what they have received, because an exception has interrupted the delivery."""


class Finished(Item):
    """A finished step, or another finished pass.

    Parameters
    ----------
    rows : Measurements
        Its measurements.
    event : NetworkMessage or None
        The message ``batch_finished`` of a training step.
    observer : StepObserver, optional
        Observes training steps beside the subscribers.
    """

    def __init__(self, rows: Measurements, event: NetworkMessage | None, observer: StepObserver | None = None) -> None:
        self.rows, self.event, self.observer = rows, event, observer
        self.stamp, self.early = rows.stamp, _Early()
        self.arrived = rows.arrived  # type: ignore[method-assign]  # a call less at each step

    def evaluate(self, bus: Delivery) -> None:
        """Let subscribers evaluate the model now, before training changes it; their results are delivered with the event."""
        if self.event is not None:
            bus.evaluate_early(self.event, self.early)

    def deliver(self, bus: Delivery) -> None:
        """Deliver the measurements to one subscriber after the other, then the event, then the end of the step."""
        rows, event, observer = self.rows, self.event, self.observer
        rows.complete()
        if event is not None:
            event.skipped, event.data["learning_rates"] = rows.skipped, rows.rates
            if observer is not None:
                observer.rows_complete(rows, event)
        is_late = False
        bus.step = rows.stamp, rows.sampled
        try:
            for registered, batches, step in rows.taken():
                if not rows.skipped or registered.subscriber.sees_skipped:
                    results = bus.expected.pop(registered, ())  # of the subscribers before it
                    if results or batches or step is not None:
                        bus.deliver(registered, *results, *batches, step=step)
            if event is not None and event.kind in bus.by_kind:
                bus.expect(event, _NONE if rows.skipped else self.early)
            if bus.expected:
                bus.deliver_expected()
            is_late = bool(bus.late)
            if is_late:  # results of this step are being computed
                bus.late.append(_End(self))
            else:
                self.end(bus)
        finally:
            if observer is not None and event is not None and not is_late:
                observer.step_delivered(rows.stamp)

    def end(self, bus: Delivery) -> None:
        """Deliver the end of the step, after all of its results."""
        rows, stamp = self.rows, (self.rows.stamp,)
        bus.step = rows.stamp, rows.sampled
        for registered in rows.subscriptions:
            if registered in bus.expected:  # others have published it at the end
                bus.deliver(registered, *bus.expected.pop(registered))
            is_asked = registered.finishes and (not rows.skipped or registered.subscriber.sees_skipped)
            if is_asked and not registered.disabled:
                bus.error_guard.call_each(registered, "finish", registered.subscriber.finish, stamp)
            if registered.subscriber._untaken:  # also what was emitted in `measure`
                bus.pass_on(registered, registered.subscriber.take_results())
        bus.settle()
        for registered in bus.registered:
            if registered.waiting:
                registered.drop_incomplete(rows.stamp)
        if bus.run is not None:
            bus.run.commit(rows.stamp.global_step)

    def abandon(self, bus: Delivery) -> None:
        """Make subscribers forget what they have received of the step; what they have published is committed."""
        rows = self.rows
        rows.abandon()
        for registered in bus.registered:
            if registered.samples(rows.stamp):
                bus.error_guard.call(registered, "abandon", registered.subscriber.abandon, rows.stamp)
            registered.subscriber.take_results()
            registered.drop_incomplete(rows.stamp)
        bus.commit(rows.stamp.global_step)


class Event(Item):
    """An event of the whole network, such as the end of an epoch.

    Parameters
    ----------
    message : NetworkMessage
        Its message.
    """

    def __init__(self, message: Message) -> None:
        self.message, self.stamp, self.early = message, message.stamp, _Early()

    def evaluate(self, bus: Delivery) -> None:
        """Let subscribers evaluate the model now, before training changes it; their results are delivered with the event."""
        bus.evaluate_early(self.message, self.early)

    def deliver(self, bus: Delivery) -> None:
        """Deliver the event."""
        bus.publish(self.message, self.early)


class Losses(Item):
    """The losses of steps in a row of which subscribers want nothing else.

    Parameters
    ----------
    block : StepLosses
        The losses.
    subscriptions : sequence of Registered
        The subscribers.
    """

    def __init__(self, block: StepLosses, subscriptions: Sequence[Registered]) -> None:
        self._block, self._subscriptions = block, subscriptions
        self.stamp = block.last

    def deliver(self, bus: Delivery) -> None:
        """Deliver the losses to one subscriber after the other, then the end of the last step."""
        for registered in self._subscriptions:
            subscriber = registered.subscriber
            if not registered.disabled:
                bus.error_guard.call(registered, "compute", subscriber.compute_losses, self._block)
            if subscriber._untaken:
                bus.pass_on(registered, subscriber.take_results())
        bus.commit(self.stamp.global_step)


class _LateResult(Item):
    """A result of a subscriber that is being computed."""

    def __init__(self, registered: Registered, later: Later) -> None:
        self.stamp, self._registered, self._later = later.stamp, registered, later
        self.arrived = later.pending.arrived  # type: ignore[method-assign]

    def deliver(self, bus: Delivery) -> None:
        registered = self._registered
        if not registered.disabled:
            bus.error_guard.call(registered, "compute", self._later.then, self._later.pending)
            bus.pass_on(registered, registered.subscriber.take_results())


class _End(Item):
    """The end of a step, which is delivered after the results that its subscribers wait for."""

    def __init__(self, finished: Finished) -> None:
        self.stamp, self._finished = finished.stamp, finished

    def deliver(self, bus: Delivery) -> None:
        try:
            self._finished.end(bus)
        finally:
            if self._finished.observer is not None and self._finished.event is not None:
                self._finished.observer.step_delivered(self.stamp)

    def abandon(self, bus: Delivery) -> None:
        self._finished.abandon(bus)
