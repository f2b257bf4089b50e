"""The queue of a delivery against a list, and what a delivery passes on to subscribers and to the run."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.export.messages import MessageBus, NetworkMessage, Stamp
from ikkuna.export.subscriber import Subscriber
from ikkuna.metrics.bus.delivery import Event, Finished, Item, Losses
from ikkuna.metrics.messages.batch import MessageBatch, StepLosses
from tests.export.test_rows import STAMP, Case, Ranks, Summing


class Interrupted(BaseException):
    """A request of the user."""


class Scripted(Item):
    """An item that arrives when it is told to, and ends in a given way."""

    def __init__(self, number, is_here, outcome, late, events):
        self.stamp, self.number, self.is_here = Stamp(number, number, 0), number, is_here
        self.outcome, self.parts, self.events, self.begun = outcome, late, events, False

    def arrived(self):
        return self.is_here

    def deliver(self, bus):
        assert bus._is_held
        self.events.append(("delivered", self.number))
        bus.late += self.parts
        if self.outcome != "delivered":
            raise {"error": ValueError, "interrupted": Interrupted}[self.outcome]("on purpose")

    def abandon(self, bus):
        self.events.append(("abandoned", self.number))
        if self.outcome == "error":
            raise ValueError("again")


OUTCOMES = st.sampled_from(["delivered", "delivered", "error", "interrupted"])
PARTS = st.lists(st.tuples(st.booleans(), st.sampled_from(["delivered", "error"])), max_size=2)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.booleans(), OUTCOMES, PARTS),
        st.tuples(st.just("arrive"), st.integers(0, 9)),
        st.tuples(st.just("drain"), st.booleans()),
    ),
    max_size=25,
)


def drained(waiting, wait):
    """Return what a drain of a list does, how many errors it has, and whether it is interrupted; remove what is done."""
    events, errors = [], 0
    while waiting:
        first = waiting[0]
        if first.begun:
            waiting.popleft()
            events.append(("abandoned", first.number))
            continue
        if not (wait or first.is_here):
            break
        events.append(("delivered", first.number))
        first.begun = True
        if first.outcome == "interrupted":
            return events, errors, True
        errors += first.outcome == "error"
        waiting.popleft()
        waiting.extendleft(reversed(first.parts))
    return events, errors, False


@settings(max_examples=150)
@given(ACTIONS)
def test_items_are_delivered_in_order_each_as_soon_as_all_before_it_have_arrived(actions):
    bus, waiting, events, expected, errors, every = MessageBus("queue"), deque(), [], [], 0, []
    for number, (action, *arguments) in enumerate(actions):
        if action == "add":
            is_here, outcome, parts = arguments
            late = [Scripted(100 * number + i, *part, [], events) for i, part in enumerate(parts, 1)]
            item = Scripted(100 * number, is_here, outcome, late, events)
            every += [item, *late]
            bus.queue.append(item)
            waiting.append(item)
        elif action == "arrive" and every:
            every[arguments[0] % len(every)].is_here = True
        elif action == "drain":
            found, more, is_interrupted = drained(waiting, *arguments)
            expected += found
            errors += more
            if is_interrupted:
                with pytest.raises(Interrupted):
                    bus.drain(*arguments)
            else:
                bus.drain(*arguments)
            assert (events, bus.error_guard.errors) == (expected, errors)
            assert list(bus.queue) == list(waiting)
            assert not bus._is_held
            assert bus.step == (None, frozenset()) or is_interrupted


def test_nothing_is_delivered_while_a_subscriber_that_may_evaluate_the_model_is_called(bus):
    events = []
    bus.queue.append(Scripted(1, True, "delivered", [], events))
    with bus.hold():
        with bus.hold():
            bus.drain(wait=True)
        bus.drain(wait=True)
        assert events == []
    bus.drain()
    assert events == [("delivered", 1)]


def test_the_first_tenth_and_hundredth_interruption_are_logged(bus, caplog):
    for number in range(100):
        bus.queue.append(Scripted(number, True, "interrupted", [], []))
        with pytest.raises(Interrupted):
            bus.drain()
    bus.drain()
    steps = [message.split("step ")[1].split(";")[0] for message in caplog.messages]
    assert steps == ["0", "9", "99"]


# -- what is passed on


class Run:
    """Keeps what it receives."""

    def __init__(self):
        self.calls = []

    def add_all(self, added, step, backends):
        self.calls += [(step, arguments[0].kind, float(np.ravel(arguments[1])[0])) for _, arguments, _ in added]

    def commit(self, step):
        self.calls.append(("commit", step))

    def close(self):
        pass


class Handling(Subscriber):
    """Emits a number for each message of an event, and for each block of losses."""

    derived = True

    def __init__(self, kind, publishes, error=None, **options):
        super().__init__(kind, publishes=publishes, **options)
        self.seen, self.error = [], error

    def _handle(self, stamp, value):
        self.seen.append(value)
        self.emit(NetworkMessage(stamp, "event"), value)
        if self.error is not None:
            raise self.error

    def compute(self, message):
        self._handle(message.stamp, message.stamp.global_step)

    def compute_losses(self, block):
        self._handle(block.last, block.losses[-1])


class OfLoss(Handling):
    """Reads the statistics of the loss."""

    fields = ("m4",)


@pytest.fixture
def run(bus, monkeypatch):
    made = Run()
    monkeypatch.setattr(bus, "run", made)
    return made


def block_of(first, losses):
    return StepLosses(Stamp(first, first, 0), losses=list(losses))


def test_losses_reach_every_subscriber_that_is_not_disabled_and_end_their_last_step(bus, run):
    first, failing, last = (OfLoss("loss", f"seen{i}", ValueError("wrong") if i == 1 else None) for i in range(3))
    for each in (first, failing, last):
        bus.register_subscriber(each)
    registered = list(bus.registered)
    bus.queue.append(Losses(block_of(3, [1.0, 2.0]), registered))
    bus.drain()
    assert [first.seen, failing.seen, last.seen] == [[2.0]] * 3
    assert run.calls == [*((4, f"seen{i}", 2.0) for i in range(3)), ("commit", 4)]
    assert bus.error_guard.errors == 1
    registered[0].disabled = True
    bus.queue.append(Losses(block_of(5, [7.0]), registered))
    bus.drain()
    assert [first.seen, failing.seen, last.seen] == [[2.0], [2.0, 7.0], [2.0, 7.0]]
    assert run.calls[4:] == [(5, "seen1", 7.0), (5, "seen2", 7.0), ("commit", 5)]


def test_the_end_of_a_step_that_no_subscriber_samples_is_committed(bus, run):
    bus.queue.append(Item(Stamp(8, 8, 1)))
    bus.drain()
    assert run.calls == [("commit", 8)]


@pytest.mark.parametrize("is_held", [False, True])
def test_an_event_is_delivered_to_the_subscribers_of_its_kind(bus, run, is_held):
    first, other = Handling("epoch_finished", "a"), Handling("epoch_started", "b")
    then = Handling("a", "c")  # takes what the first one emits
    for each in (first, other, then):
        bus.register_subscriber(each)
    event = Event(NetworkMessage(Stamp(4, 4, 1), "epoch_finished"))
    if is_held:
        with bus.hold():
            bus.publish(event.message, event.early)
            assert first.seen == []
        bus.settle()
    else:
        bus.queue.append(event)
        bus.drain()
    assert (first.seen, other.seen, then.seen) == ([4], [], [4])
    assert run.calls == [(4, "a", 4.0), (4, "c", 4.0)]


class Evaluating(Handling):
    """Evaluates the model, so that it handles events before training changes it."""

    needs_model = True


def test_a_subscriber_that_evaluates_the_model_handles_an_event_once_and_before_its_delivery(bus, run):
    other, early = Handling("epoch_finished", "a"), Evaluating("epoch_finished", "b")
    for each in (other, early):
        bus.register_subscriber(each)
    event = Event(NetworkMessage(Stamp(4, 4, 1), "epoch_finished"))
    event.evaluate(bus)
    assert (other.seen, early.seen, run.calls) == ([], [4], [])
    bus.queue.append(event)
    bus.drain()
    assert (other.seen, early.seen) == ([4], [4])
    assert sorted(run.calls) == [(4, "a", 4.0), (4, "b", 4.0)]


def test_subscribers_receive_what_is_expected_in_the_order_of_registration(bus, run):
    for kind in "abc":
        bus.register_subscriber(Handling("epoch_finished", kind))
    batch = MessageBatch.of(NetworkMessage(Stamp(4, 4, 1), "epoch_finished"))
    bus.expected = {registered: [batch] for registered in reversed(bus.registered)}
    bus.settle()
    assert run.calls == [(4, kind, 4.0) for kind in "abc"]


@pytest.mark.parametrize("is_held", [False, True])
def test_what_the_user_lets_a_subscriber_emit_is_shown_and_published(bus, run, is_held):
    first, then = Handling("epoch_started", "a"), Handling("a", "c")
    for each in (first, then, Handling("epoch_started", "b")):
        bus.register_subscriber(each)
    message = NetworkMessage(Stamp(2, 2, 0), "event")
    if is_held:
        with bus.hold():
            first.emit(message, 5.0)
            assert (then.seen, run.calls) == ([], [])
        bus.settle()
    else:
        first.emit(message, 5.0)
    assert (then.seen, run.calls) == ([2], [(2, "a", 5.0), (2, "c", 2.0)])


class Abandoning(Summing):
    """Keeps the stamps of steps that are abandoned."""

    def __init__(self, kind, **options):
        super().__init__(kind)
        self.abandoned = []

    def abandon(self, stamp):
        self.abandoned.append(stamp)


def test_an_abandoned_step_is_forgotten_by_its_subscribers_and_other_ranks_and_is_committed(monkeypatch):
    case = Case(abandoning := Abandoning("activations"))
    monkeypatch.setattr(case.bus, "run", run := Run())
    case.see([1.0, 2.0])
    rows = case.recorder.close()
    rows.rank_merge = ranks = Ranks()
    abandoning._untaken.append("a result")
    Finished(rows, None).abandon(case.bus)
    assert (abandoning.abandoned, abandoning.values, abandoning._untaken) == ([STAMP], [], [])
    assert ranks.calls == ["abandoned"]
    assert run.calls == [("commit", STAMP.global_step)]
    monkeypatch.undo()
    case.bus.close()
