"""The step tracker as a table: sequences of events, and which forwards belong to which steps.

Events are words.  Forwards have names; an optimizer has a number.

=================  ===================================================================
``a``              a forward ``a`` in training mode begins and ends
``a(`` and ``)``   it begins; it ends
``eval:a``         a forward in evaluation mode, with gradients
``nograd:a``       a forward without gradients
``part:a``         a call of a module outside any root; ``a`` names a new forward
``bwd:a``          a backward through ``a`` that adds to the gradients of parameters
``grad:a``         ``torch.autograd.grad`` for parameters through ``a``
``clear``          gradients are seen to be cleared
``1`` to ``3``     the whole step of an optimizer
``1[`` and ``1]``  an optimizer's step begins; it ends (``1{``: it begins with a closure)
``calc``           something is computed for a backward, which no event reports: parts are called in a step that is not sampled
``raise``          everything that runs is left by an exception, without an event
``pass:x``         another pass ``x`` begins; ``train`` ends it
``epoch``          an epoch ends
``finish``         the exporter is closed
=================  ===================================================================

The expected text has a word for each decision: ``open0``, ``0=ab`` (step 0 is closed with the forwards a and b),
``0~a`` (the same, skipped), ``drop=a``, ``params`` (what was recorded of parameters is dropped), ``abandon``, ``epoch0``.
"""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Stamp
from ikkuna.observation.steps.forwards import (
    FIRST_PART,
    MAX_PENDING,
    Abandoned,
    Awaited,
    Closed,
    EpochFinished,
    Merged,
    Opened,
    OptimizerTurns,
    Restarted,
)
from ikkuna.observation.steps.step_tracker import State, StepTracker

ALL = {7, 8}  # the parameters of the model


class Script:
    """Plays events to a tracker, and keeps the names of forwards in parts as a recorder keeps measurements."""

    def __init__(self, owners=(1,), owned=None, covered=True):
        self.tracker = StepTracker()
        self.owners = set(owners)
        self.owned = owned or dict.fromkeys((1, 2, 3), ALL)
        self.covered = covered
        self.forwards, self.parts, self.running, self.seen = {}, {}, [], []
        self.computed = True
        self.opened, self.epochs, self.turns, self.known_owners = None, set(), OptimizerTurns(), ()

    def play(self, events):
        for event in events.split():
            self.event(event)
        return " ".join(self.seen)

    def event(self, event):
        tracker = self.tracker
        head, _, name = event.rpartition(":")
        self.computed = self.computed or head == "part" or event == "calc"
        if event == ")":
            tracker.forward_ends(0)
        elif event in (
            calls := {"clear": tracker.gradients_cleared, "epoch": tracker.epoch_ends, "finish": tracker.finish}
        ):
            self.apply(calls[event]())
        elif event == "raise":
            self.running.clear()
            self.depth = 0
        elif event == "train":
            tracker.pass_ends()
        elif head == "pass":
            self.apply(tracker.pass_begins(name))
        elif head in ("bwd", "grad"):
            self.apply(tracker.backward_reached(self.forwards[name], captured=head == "grad"))
        elif head == "part":
            forward, decisions = tracker.part_called(0, running=self.running)
            self.apply(decisions)
            self.note(name, forward)
        elif event == "hand" or event[0].isdigit():
            self.optimizer(event[0], event[1:])
        elif event != "calc":
            self.forward(name.rstrip("("), head, ends=not event.endswith("("))

    def forward(self, name, mode, ends):
        tracker = self.tracker
        depth = getattr(self, "depth", None)
        self.depth = None
        self.computed = self.computed or mode != "nograd"
        self.apply(tracker.forward_begins(0, mode != "eval", mode != "nograd", depth=depth, running=self.running))
        self.note(name, tracker.calls[0].running[0])
        if ends:
            tracker.forward_ends(0)

    def note(self, name, forward):
        self.forwards[name] = forward
        if forward is not None and forward.part >= FIRST_PART:
            self.parts.setdefault(forward.part, []).append(name)

    def optimizer(self, number, bracket):
        if number == "h":
            self.apply(self.tracker.step_by_hand(self.computed))
            self.computed = False
            return
        number = int(number)
        if bracket in ("", "[", "{"):
            running = tuple(reversed(self.running))
            decisions = self.tracker.optimizer_begins(
                *(number, self.owned.get(number, ())), closure=bracket == "{", running=running, computed=self.computed
            )
            self.apply(decisions)
            self.running.append(number)
        if bracket in ("", "]"):
            self.running.pop()
            self.known_owners = self.owners
            self.apply(self.tracker.optimizer_ends(number, self.owners, self.covered))
            self.computed = False

    def apply(self, decisions):
        for decision in decisions:
            self.check(decision)
            match decision:
                case Opened(stamp):
                    self.seen.append(f"open{stamp.global_step}")
                case Merged(source, target):
                    self.parts.setdefault(target, []).extend(self.parts.pop(source, []))
                case Restarted(parts, parameters):
                    if gone := self.names(parts):
                        self.seen.append(f"drop={gone}")
                    if parameters:
                        self.seen.append("params")
                case Closed(stamp, skipped, parts, carried):
                    self.seen.append(f"{stamp.global_step}{'~' if skipped else '='}{self.names(parts)}")
                    self.parts = {part: self.parts[part] for part in carried if part in self.parts}
                case Abandoned():
                    self.seen.append("abandon")
                    self.parts.clear()
                case EpochFinished(stamp):
                    self.seen.append(f"epoch{stamp.epoch}")

    def check(self, decision):
        """Check what holds for every loop: the stamps of a step, the beginnings of epochs, and what completes earlier samples."""
        match decision:
            case Opened(stamp, starts_epoch, is_carried):
                assert self.opened is None or is_carried
                assert starts_epoch <= (stamp.epoch not in self.epochs)
                if starts_epoch:
                    self.epochs.add(stamp.epoch)
                self.opened = stamp
            case Closed(stamp, skipped, carried=carried, optimizers=stepped):
                assert stamp == self.opened
                assert stamp.completes == self.turns.completed_by(stamp.global_step)
                assert skipped <= (not stepped)
                if not skipped:
                    self.turns.step_closed(
                        Stamp(stamp.global_step, stamp.train_step, stamp.epoch), stepped, self.known_owners
                    )
                self.opened = stamp if carried else None
            case Abandoned():
                self.opened = None
            case Awaited(stamp):
                assert stamp.global_step == self.opened.global_step + 1
                assert stamp.completes == self.turns.completed_by(stamp.global_step)

    def check_only_optimizer(self):
        """Check that the next step is as `only_optimizer` says."""
        if (only := self.tracker.only_optimizer) is None:
            return
        tracker = copy.deepcopy(self.tracker)
        (opened,) = tracker.forward_begins(0)
        assert opened == Opened(self.tracker.stamp, False, False)
        forward = tracker.forward_ends(0)
        assert (tracker.backward_reached(forward), tracker.optimizer_begins(only, self.owned[only])) == ((), ())
        closed, *_ = tracker.optimizer_ends(only, self.owners, self.covered)
        assert (closed.stamp, closed.skipped, closed.optimizers) == (opened.stamp, False, {only})

    def names(self, parts):
        return "".join(sorted(name for part in parts for name in self.parts.pop(part, [])))


TABLE = {
    # loops of the loops page
    "plain": ("a bwd:a 1 clear b bwd:b 1", "open0 0=a open1 1=b"),
    "accumulation": ("a bwd:a b bwd:b c bwd:c 1", "open0 0=abc"),
    "siamese": ("a b bwd:b bwd:a 1", "open0 0=ab"),
    "nested roots": ("a( b( ) ) bwd:a 1", "open0 0=ab"),
    "evaluation between steps": ("a bwd:a 1 nograd:x eval:y b bwd:b 1", "open0 0=a open1 1=b"),
    "evaluation inside a step": ("a bwd:a nograd:x b bwd:b 1", "open0 0=ab"),
    "a scaler skips a step": ("a bwd:a clear b bwd:b 1", "open0 0~a open0 0=b"),
    "L-BFGS": ("1{ a bwd:a clear b bwd:b clear c bwd:c 1]", "open0 drop=a drop=b 0=c"),
    "a micro-batch before a closure": ("a bwd:a 1{ b bwd:b 1]", "open0 0=ab"),
    "sharpness-aware step": ("a bwd:a 1{ clear b bwd:b 1]", "open0 drop=a 0=b"),
    "training in evaluation mode": ("eval:a bwd-less 1 eval:b bwd:b 1", None),
    "weights set by hand": ("a 1", "open0 0=a"),
    "a step that raises": ("a bwd:a 1[ raise b bwd:b 1", "open0 params 0=ab"),
    "a step that raises, and the optimizer tries again": ("a bwd:a 1[ raise 1", "open0 params 0=a"),
    "a closure that raises": ("1{ a raise 1{ b bwd:b 1]", "open0 0~a open0 0=b"),
    "a step that calls itself": ("a bwd:a 1[ 1[ 1] 1]", "open0 0=a"),
    "an optimizer that wraps another": ("a bwd:a 1[ 2 1]", "open0 0=a"),
    "optimizers of other models": ("a bwd:a 4 1", "open0 0=a"),
    "parts only": ("1 part:a bwd:a 1 clear part:b bwd:b part:c bwd:c 1", "open0 0= open1 1=a open2 2=bc"),
    "a mixed step teaches nothing": ("a eval:x bwd:a 1 eval:b 1", "open0 0=a open1 1="),
    "a step that calls itself evaluates twice": ("1{ 1{ a bwd:a 1] b bwd:b 1]", "open0 0=ab"),
    "parts join until a backward": ("1 part:a part:b bwd:a 1", "open0 0= open1 1=ab"),
    "parts beside a root": ("a part:b bwd:a 1", "open0 0=a"),
    "a root after parts": ("1 part:a bwd:a 1 b bwd:b 1 part:c 1", "open0 0= open1 1=a open2 2=b open3 3="),
    "parts before a closure": ("part:a 1{ part:b bwd:b 1] part:c bwd:c 1", "open0 0= open1 1=c"),
    "a pass between steps": ("a bwd:a 1 pass:x b train c bwd:c 1", "open0 0=a open1 1=c"),
    "a pass inside a step": ("a bwd:a pass:x y train b bwd:b 1", "open0 0=ab"),
    "epochs": ("a bwd:a 1 epoch epoch b bwd:b 1 epoch", "open0 0=a epoch0 open1 1=b epoch1"),
    "an epoch of parts alone has not begun": ("part:a epoch", ""),
    "an epoch of parts and a root has begun": ("part:a b epoch", "open0 epoch0"),
    "the first step does not say how later ones train": (
        "a bwd:a 1 eval:b 1 eval:c bwd:c 1",
        "open0 0=a open1 1= open2 2=c",
    ),
    "close without a step": ("a bwd:a finish", "open0 abandon"),
    "close in a step of the optimizer": ("a bwd:a 1[ finish raise b bwd:b 1", "open0 abandon open0 0=b"),
    # the defects of the issue on the house, each with its mirror image
    "1: an interrupted forward": ("a( raise b bwd:b 1", "open0 0=b"),
    "1: a nested forward that is not interrupted": ("a( b( ) c( ) ) bwd:a 1", "open0 0=abc"),
    "2: zero_grad between forward and backward": ("a bwd:a b clear bwd:b 1", "open0 0~a open0 0=b"),
    "2: zero_grad before the forward": ("a bwd:a clear b bwd:b 1", "open0 0~a open0 0=b"),
    "2: zero_grad between, in a closure": ("1{ a bwd:a b clear bwd:b 1]", "open0 drop=a 0=b"),
    "6: autograd.grad for the parameters": ("a grad:a 1", "open0 0=a"),
    "6: autograd.grad for a penalty, then a backward": ("a grad:a bwd:a 1", "open0 0=a"),
    "9: a forward without a backward": ("x a bwd:a 1", "open0 0=a"),
    "9: a forward without a backward, behind": ("a x bwd:a 1", "open0 0=a"),
    "9: two forwards with one backward": ("a b bwd:b bwd:a 1", "open0 0=ab"),
}
TABLE["training in evaluation mode"] = (
    "eval:a 1 eval:b bwd:b 1 c bwd:c 1 eval:d e bwd:e 1",
    "open0 0= open1 1=b open2 2=c open3 3=e",
)

TWO_OPTIMIZERS = {
    "zero_grad while a step waits for another optimizer": ("a bwd:a 1 clear b bwd:b 1", "open0 0=a open1", True),
    "two optimizers of different parts": ("a bwd:a 1 2 b bwd:b 1 2", "open0 0=a open1 1=b", True),
    "3: optimizers that step in backward": ("a bwd:a 2 1 b bwd:b 2 1", "open0 0=a open1 1=b", True),
    "4: two optimizers of the same parameters": ("a bwd:a 1 2 b bwd:b 1 2", "open0 0=a open1 1=b", False),
    "4: they take turns, with a forward between": ("a bwd:a 1 b bwd:b 2 c bwd:c 1", "open0 0=a open1 1=b open2", False),
    "the second steps now and then": ("a bwd:a 1 b bwd:b 1 2 c bwd:c 1 finish", "open0 0=a open1 1=b open2 2=c", True),
    "in turns": ("a bwd:a 1 b bwd:b 2 c bwd:c 1 finish", "open0 0=a open1 1=b open2 2=c", True),
    "in turns, by closures": ("1{ a bwd:a 1] 2{ b bwd:b 2] finish", "open0 0=a open1 1=b", True),
    "in turns, parts seen": ("1 part:a bwd:a 2 part:b bwd:b 1 finish", "open0 0= open1 1=a open2 2=b", True),
    "in turns, parts not seen": ("1 calc 2 calc 1 finish", "open0 0= open1 1= open2 2=", True),
    "together after a part": ("1 2 part:a bwd:a 1 2 finish", "open0 0= open1 1=a", True),
    "together, parts not seen": ("1 2 calc 1 2 finish", "open0 0= open1 1=", True),
    "a backward of its own, no forward": ("a b bwd:a 1 calc bwd:b 2 finish", "open0 0=ab open1 1=", True),
    "a part without a backward between": ("1 part:a bwd:a 1 part:x 2 finish", "open0 0= open1 1=a open2 2=x", True),
    "a part between, not seen": ("1 calc 1 calc 2 finish", "open0 0= open1 1= open2 2=", True),
    "one steps twice": ("a bwd:a 1 bwd:a 1 2", "open0 0=a open1 1=", True),
}


@pytest.mark.parametrize("events", TABLE)
def test_sequences_of_events(events):
    words, expected = TABLE[events]
    assert Script().play(words) == expected


@pytest.mark.parametrize("events", TWO_OPTIMIZERS)
def test_two_optimizers(events):
    words, expected, apart = TWO_OPTIMIZERS[events]
    owned = {1: {7}, 2: {8}} if apart else {1: ALL, 2: ALL}
    assert Script(owners=(1, 2), owned=owned).play(words) == expected


def test_a_step_waits_for_unknown_owners_until_the_same_optimizers_have_stepped_twice():
    script = Script(covered=False)
    assert script.play("a bwd:a 1") == "open0"
    assert script.play("b bwd:b 1") == "open0 0=a open1 1=b"


def test_a_pass_has_the_stamp_of_the_open_step_or_of_the_last_one():
    script = Script()
    assert script.tracker.pass_stamp("x") == Stamp(0, 0, 0, "x")
    script.play("a bwd:a 1")
    assert script.tracker.pass_stamp("x") == Stamp(0, 0, 0, "x")
    script.play("b bwd:b")
    assert script.tracker.pass_stamp("x") == Stamp(1, 1, 0, "x")
    script.play("1")
    assert script.tracker.pass_stamp("x") == Stamp(1, 1, 0, "x")


def test_a_pass_closes_a_step_that_waits_for_other_optimizers():
    script = Script(owners=(1, 2), owned={1: {7}, 2: {8}})
    assert script.play("a bwd:a 1 pass:x b train") == "open0 0=a"


def test_every_call_in_a_pass_is_recorded_and_no_optimizer_counts():
    script = Script()
    assert script.play("pass:x nograd:a eval:b 1 train") == ""
    assert script.forwards["a"] is script.forwards["b"] is not None


@pytest.mark.parametrize("in_pass", [False, True])
def test_a_call_with_meaningless_inputs_never_counts(in_pass):
    tracker = StepTracker()
    if in_pass:
        tracker.pass_begins("testing")
    assert tracker.forward_begins(1, is_dry=True) == ()
    assert tracker.calls[1].running == [None]
    assert tracker.forward_begins(1) == ()  # a root inside
    assert tracker.forward_ends(1) is tracker.forward_ends(1) is None
    assert tracker.calls[1].last is None
    assert tracker.state is State.IDLE


def test_an_epoch_of_a_given_number_of_steps_ends_by_itself_and_once():
    script = Script()
    script.tracker.counters.set_steps_per_epoch(2)
    assert script.play("a bwd:a 1 b bwd:b 1") == "open0 0=a open1 1=b epoch0"
    assert script.play("epoch c bwd:c 1") == "open0 0=a open1 1=b epoch0 open2 2=c"
    assert script.tracker.stamp == Stamp(3, 1, 1)


def test_the_first_step_of_an_epoch_announces_it():
    script, found = Script(), []
    script.apply = lambda decisions: found.extend(d.starts_epoch for d in decisions if isinstance(d, Opened))
    script.play("a bwd:a clear b bwd:b 1 c bwd:c 1 epoch d bwd:d 1")
    assert found == [True, False, False, True]


def test_threads_do_not_share_a_call_stack():
    tracker = StepTracker()
    tracker.forward_begins(1)
    (outer,) = tracker.calls[1].running
    assert tracker.forward_begins(2, gradients=False) == ()
    assert tracker.calls[2].running == [None]
    assert tracker.calls[1].running == [outer]
    assert tracker.forward_ends(2) is None
    assert tracker.forward_ends(1) is outer
    tracker.backward_reached(outer)
    tracker.optimizer_begins(1, ALL)
    (closed,) = tracker.optimizer_ends(1, {1})
    assert outer.part == -1 or closed.parts[-1] >= FIRST_PART
    assert not closed.skipped


def test_compiled_forwards_are_reached_from_the_last_to_the_first():
    script = Script()
    for _ in "ab":
        script.tracker.forward_begins(0, is_compiled=True)
    latest = script.tracker.forwards.latest_compiled
    assert latest is script.tracker.forwards.latest
    script.tracker.backward_reached(latest)
    assert script.tracker.forwards.latest_compiled is not latest
    assert not script.tracker.calls[0].running


def test_gradients_that_autograd_grad_returned_are_dropped_by_a_backward_alone():
    script = Script()
    script.play("a grad:a")
    forward = script.forwards["a"]
    assert script.tracker.backward_reached(forward, captured=True) == ()
    assert script.tracker.backward_reached(forward) == (Restarted((forward.provisional_part,)),)


def test_gradients_that_autograd_grad_returned_belong_to_the_step():
    tracker = StepTracker()
    tracker.forward_begins(0)
    forward = tracker.forward_ends(0)
    tracker.backward_reached(forward, captured=True)
    parts = {forward.part, forward.provisional_part}
    tracker.optimizer_begins(1, ALL)
    (closed,) = tracker.optimizer_ends(1, {1})
    assert parts <= set(closed.parts)


def test_the_step_of_a_wrapped_optimizer_is_not_one_of_its_own():
    script = Script()
    script.play("a bwd:a 1[")
    script.tracker.optimizer_begins(2, ALL, running=[1])
    assert script.tracker.optimizers.is_stepping(1)
    assert not script.tracker.optimizers.is_stepping(2)
    script.tracker.optimizer_begins(1, ALL, running=[1])
    assert not script.tracker.optimizers.is_stepping(1)


def test_many_forwards_without_a_backward_share_parts():
    script = Script()
    names = "abcdefghijklmnopqrstuvwxyz"
    script.play(" ".join(names))
    assert len(script.parts) <= MAX_PENDING
    script.play(" ".join(f"bwd:{name}" for name in names))
    assert script.play("1") == f"open0 0={names}"


def test_a_forward_that_was_discarded_can_be_reached_without_effect():
    script = Script()
    script.play("a bwd:a clear")
    stale = script.forwards["a"]
    assert stale.part == -1
    assert stale.provisional_part == -1
    assert script.tracker.backward_reached(stale) == ()
    assert script.tracker.provisional_counts(stale) == ()


def test_a_backward_that_proves_to_count_moves_its_gradients():
    script = Script()
    script.play("a")
    forward = script.forwards["a"]
    assert script.tracker.provisional_counts(forward) == (Merged(forward.part + 1, forward.part),)
    assert script.play("x 1") == "open0 0=a"


def test_forwards_are_counted_until_the_first_step():
    script = Script()
    script.play("a b c")
    assert script.tracker.forwards_without_step == 3
    script.play("1 d e")
    assert script.tracker.forwards_without_step == 0
    script = Script()
    script.play("1[ raise part:a part:b bwd:a part:c part:d")  # parts count together until a backward
    assert script.tracker.forwards_without_step == 2


def test_step_by_hand_closes_the_open_step():
    tracker = StepTracker()
    assert tracker.step_by_hand() == ()
    tracker.forward_begins(0)
    (closed,) = tracker.step_by_hand()
    assert closed.stamp == Stamp(0, 0, 0)
    assert tracker.state is State.IDLE


def test_step_by_hand_of_a_model_that_is_never_called_as_a_whole():
    assert Script().play("hand hand part:a bwd:a hand calc hand hand") == "open0 0= open1 1=a open2 2="


def test_a_part_that_computes_nothing_leaves_the_step_to_the_other_optimizer():
    script = Script(owners=(1, 2), owned={1: {7}, 2: {8}})
    script.play("1")
    assert script.tracker.part_called(0, computed=False) == (None, ())
    assert script.play("2") == "open0 0="


def test_optimizers_share_a_step_unless_something_is_said_to_be_computed_between():
    tracker = StepTracker()
    for optimizer, parameter in ((1, 7), (2, 8)):
        tracker.optimizer_begins(optimizer, {parameter})
        decisions = tracker.optimizer_ends(optimizer, {1, 2})
    assert [closed.optimizers for closed in decisions] == [{1, 2}]


@pytest.mark.parametrize(
    ("events", "owners", "only"),
    [
        ("", (1,), None),
        ("a bwd:a 1", (1,), 1),
        ("a bwd:a 1 nograd:x", (1,), 1),
        ("a bwd:a 1 eval:x", (1,), None),
        ("a bwd:a 1 b", (1,), None),
        ("a bwd:a 1 b bwd:b 1", (1,), 1),
        ("a bwd:a 1 b bwd:b clear", (1,), None),
        ("a bwd:a 1 pass:x", (1,), None),
        ("a bwd:a 1 pass:x y train", (1,), 1),
        ("a bwd:a 1 epoch", (1,), None),
        ("a bwd:a 1 nograd:x(", (1,), None),
        ("eval:a 1 eval:b bwd:b 1", (1,), None),
        ("1 part:a bwd:a 1", (1,), None),
        ("a bwd:a 1 2", (1, 2), None),
        ("a bwd:a 1 b bwd:b 2", (1, 2), None),
    ],
)
def test_the_only_optimizer_is_known_between_two_steps_that_are_alike(events, owners, only):
    script = Script(owners)
    script.play(events)
    assert script.tracker.only_optimizer == only
    script.check_only_optimizer()


def test_a_step_that_waits_names_the_stamp_of_the_next_one():
    script = Script(owners=(1, 2), owned={1: {7}, 2: {8}})
    script.play("a bwd:a 1 b bwd:b 2 c bwd:c")
    script.tracker.optimizer_begins(1, {7})
    (awaited,) = script.tracker.optimizer_ends(1, {1, 2})
    assert awaited == Awaited(Stamp(3, 3, 0))
    assert awaited.stamp.completes == script.turns.completed_by(3)
    script.check(awaited)


def test_a_step_of_parts_that_a_root_confirms_begins_its_epoch():
    script = Script()
    script.play("1 part:a")
    assert script.tracker.pass_stamp("x") == Stamp(0, 0, 0, "x")
    script.play("b")
    assert script.tracker.pass_stamp("x") == Stamp(1, 1, 0, "x")
    script = Script()
    script.play("1 epoch part:a 1 epoch part:b c")
    assert script.tracker.stamp == script.tracker.counters.stamp()
    assert script.play("epoch").endswith(f"epoch{script.tracker.stamp.epoch - 1}")


def test_an_optimizers_step_that_is_abandoned_does_not_run_any_more():
    script = Script()
    script.play("a bwd:a 1[")
    script.tracker.abandon()
    script.parts.clear()
    script.opened = None
    assert script.play("raise b bwd:b 1") == "open0 open0 0=b"


@pytest.mark.parametrize("events", ["calc 1 part:a", "calc 1 calc"])
def test_calls_of_parts_change_neither_epochs_nor_the_stamps_of_passes(events):
    script = Script()
    script.play(events)
    assert script.tracker.pass_stamp("x") == Stamp(0, 0, 0, "x")
    script.play("epoch part:b epoch epoch" if "part" in events else "epoch epoch epoch")
    assert script.tracker.stamp == Stamp(1, 0, 1)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_steps_per_epoch_is_checked(steps):
    with pytest.raises(ConfigError, match="steps_per_epoch must be an int >= 1"):
        StepTracker().counters.set_steps_per_epoch(steps)


def test_counting_continues_from_a_saved_state():
    script = Script()
    script.play("a bwd:a 1 epoch b bwd:b 1")
    state = script.tracker.counters.state_dict()
    other = StepTracker()
    other.counters.load_state_dict(state)
    assert other.stamp == script.tracker.stamp == Stamp(2, 1, 1)


# -- against a second implementation ------------------------------------------------------------------------------------


class Gradients:
    """The rule itself, kept naively: which forwards are in the gradients that the optimizers use."""

    def __init__(self, owners):
        self.owners = owners
        self.alive, self.inside, self.stepped = [], [], set()
        self.is_open, self.steps = False, []

    def close(self):
        used = [f for f in self.alive if f in self.inside] or list(self.alive)
        self.steps.append("".join(sorted(used)))
        self.alive, self.inside, self.stepped, self.is_open = [], [], set(), False

    def forward(self, name):
        if self.stepped:
            self.close()
        self.alive.append(name)
        self.is_open = True

    def backward(self, names):
        self.inside += [name for name in names if name in self.alive]

    def clear(self):
        if self.inside and not self.stepped:  # gradients that an optimizer has used are not thrown away
            self.alive = [name for name in self.alive if name not in self.inside]
            self.inside = []
            self.is_open = bool(self.alive)

    def step(self, optimizer):
        if optimizer in self.stepped:
            self.close()
        self.is_open = True
        self.stepped.add(optimizer)
        if self.stepped == self.owners:
            self.close()


EVENT = st.sampled_from(["forward", "forward", "look", "backward", "backward", "clear", "step1", "step2"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(EVENT, st.integers(0, 7)), max_size=30), st.booleans())
def test_random_loops_agree_with_the_rule(events, two):
    owners = {1, 2} if two else {1}
    script, rule = Script(owners=owners), Gradients(owners)
    names = iter("abcdefghijklmnopqrstuvwxyzABCDEF")
    for kind, choice in events:
        open_forwards = list(rule.alive)
        if kind == "forward":
            name = next(names)
            rule.forward(name)
            script.play(name)
        elif kind == "look":
            script.play("nograd:_")
        elif kind == "backward" and open_forwards and not rule.stepped:
            chosen = [f for i, f in enumerate(open_forwards) if choice >> i & 1] or open_forwards[-1:]
            rule.backward(chosen)
            script.play(" ".join(f"bwd:{name}" for name in reversed(chosen)))
        elif kind == "clear":
            rule.clear()
            script.play("clear")
        elif kind == "step1" or (kind == "step2" and two):
            rule.step(int(kind[-1]))
            script.play(kind[-1])
        script.check_only_optimizer()
    closed = [word.partition("=")[2] for word in script.seen if "=" in word and not word.startswith("drop")]
    assert closed == rule.steps
