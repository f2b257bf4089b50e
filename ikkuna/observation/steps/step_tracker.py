"""A state machine that counts steps and epochs, and says which forwards belong to which step."""

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from enum import Enum

from ikkuna.errors import ConfigError, is_integer
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.observation.steps.forwards import (
    EARLIER_PART,
    FIRST_PART,
    GRADIENT_PARTS,
    STEP_PART,
    Abandoned,
    Awaited,
    Closed,
    Decision,
    EpochFinished,
    Forward,
    Merged,
    Opened,
    OptimizerTurns,
    PendingForwards,
    Reach,
    Restarted,
    RunningOptimizers,
    RunningStep,
    ThreadCalls,
)


class StepCounters:
    """The numbers of steps, of steps in this epoch, and of epochs.

    Attributes
    ----------
    next : Stamp
        The stamp of the open step, or of the next one; another object after each beginning and each end of a step.
    steps_per_epoch : int or None
        Number of steps after which an epoch ends by itself; ``None`` if it does not.

    Examples
    --------
    >>> counters = StepCounters()
    >>> counters.step_closed()
    0
    >>> counters.next
    Stamp(global_step=1, train_step=1, epoch=0, pass_name='training')
    """

    def __init__(self) -> None:
        self.next = Stamp(0, 0, 0)  # one object, so that an interrupt cannot come between two assignments
        self._epoch_is_announced = self._epoch_is_open = False
        self.steps_per_epoch: int | None = None

    def stamp(self, back: int = 0, pass_name: str = TRAINING) -> Stamp:
        """Return the stamp of the step that is `back` steps before the next one, after it if `back` is negative."""
        known = self.next
        return Stamp(max(known.global_step - back, 0), max(known.train_step - back, 0), known.epoch, pass_name)

    def step_opened(self, is_certain: bool = True) -> bool:
        """Return whether the step that opens is the first of its epoch; if it is not certain, the epoch has not begun yet."""
        known = self.next
        self.next = Stamp(known.global_step, known.train_step, known.epoch)  # a step that restarts has another object
        starts_epoch, self._epoch_is_announced = not self._epoch_is_announced, True
        self._epoch_is_open = self._epoch_is_open or is_certain
        return starts_epoch

    def step_closed(self) -> int:
        """Count a step; return its number."""
        closed = self.next
        self.next = Stamp(closed.global_step + 1, closed.train_step + 1, closed.epoch)
        return closed.global_step

    def steps_closed(self, first: Stamp, steps: int) -> None:
        """Count a number of steps from `first` on; a second call changes nothing."""
        self.next = Stamp(first.global_step + steps, first.train_step + steps, self.next.epoch)

    @property
    def steps_left(self) -> float:
        """Number of steps until the epoch ends by itself."""
        return math.inf if self.steps_per_epoch is None else self.steps_per_epoch - self.next.train_step

    @property
    def epoch_has_begun(self) -> bool:
        """Whether the epoch has a step, open or closed."""
        return self._epoch_is_open or self.next.train_step > 0

    def epoch_closed(self) -> None:
        """Count an epoch."""
        self.next = Stamp(self.next.global_step, 0, self.next.epoch + 1)
        self._epoch_is_announced = self._epoch_is_open = False

    def set_steps_per_epoch(self, steps: int | None) -> None:
        """Set the number of steps after which an epoch ends by itself.

        Raises
        ------
        ConfigError
            If `steps` is neither ``None`` nor a positive int.
        """
        if steps is not None and not is_integer(steps, 1):
            raise ConfigError(f"steps_per_epoch must be an int >= 1 or None, got {steps!r}")
        self.steps_per_epoch = steps

    def state_dict(self) -> dict[str, int]:
        """Return the numbers, to be saved with a checkpoint."""
        return {name: getattr(self.next, name) for name in ("global_step", "train_step", "epoch")}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue to count from what `state_dict` returned.

        Raises
        ------
        ConfigError
            If `state` has other keys, or values that are no non-negative ints.
        """
        keys = self.state_dict().keys()
        is_known = isinstance(state, dict) and state.keys() == keys
        if not is_known or any(not isinstance(v, int) or v < 0 for v in state.values()):
            raise ConfigError(f"load_state_dict() needs what state_dict() returned, got {state!r}")
        self.next = Stamp(state["global_step"], state["train_step"], state["epoch"])


class State(Enum):
    """Where the training loop is."""

    IDLE = "no step is open"
    OPEN = "forwards are recorded, and no optimizer has stepped"
    STEPPING = "the step of an optimizer is running"
    STEPPED = "an optimizer has stepped, and others may follow"


class StepTracker:
    """Counts optimizer steps, and decides which forwards belong to which step.

    Each step of an optimizer is a step, except that several optimizers share one if nothing is computed for a backward between
    their steps.  This depends on the steps of optimizers and on the calls of roots, which are seen at every step; the calls of
    parts and the backwards, which are seen where something is recorded, decide only what is recorded.

    A step opens with an outermost call of the model in training mode with gradients, or with an optimizer's step.
    It closes when every optimizer that owns parameters of the model has stepped, at the latest at the next forward.
    A forward belongs to a step if its gradients were there when the step's optimizers used them: forwards without a backward,
    and forwards whose gradients were cleared, as a closure does before each evaluation, belong to none.

    If all forwards of a step ran in evaluation mode, forwards in evaluation mode count from the next step on,
    until a step has one in training mode.  If a model is never called as a whole, calls of its parts count as its forwards
    from the second step on.

    Each method takes an event and returns decisions in the order in which they are to be carried out.

    Attributes
    ----------
    state : State
        Where the training loop is.
    counters : StepCounters
        The numbers of steps and epochs.
    calls : dict of int to ThreadCalls
        By thread, the calls of roots that run, and the last one.
    forwards : PendingForwards
        The forwards of the open step.
    optimizers : RunningOptimizers
        The optimizers that are stepping, and those that have stepped.
    pass_name : str
        The pass over data that is recorded.
    is_rootless : bool
        Whether the model is never called as a whole, so that calls of its parts count.

    Examples
    --------
    >>> tracker = StepTracker()
    >>> tracker.forward_begins(thread=0)
    (Opened(stamp=Stamp(global_step=0, train_step=0, epoch=0, pass_name='training'), starts_epoch=True, is_carried=False),)
    >>> forward = tracker.forward_ends(thread=0)
    >>> tracker.backward_reached(forward), tracker.optimizer_begins(1, owned={7})
    ((), ())
    >>> (closed,) = tracker.optimizer_ends(1, owners={1})
    >>> closed.stamp, closed.parts, closed.optimizers
    (Stamp(global_step=0, train_step=0, epoch=0, pass_name='training'), (1, 3, 4), frozenset({1}))
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        self.counters = StepCounters()
        self.pass_name = TRAINING
        self.is_rootless = False
        self.calls: defaultdict[int, ThreadCalls] = defaultdict(ThreadCalls)
        self.forwards = PendingForwards()
        self.optimizers = RunningOptimizers()
        self._turns = OptimizerTurns()
        self._owners: Collection[int] = ()
        self._pass_forward = Forward(STEP_PART)
        self._forwards_without_step: int | None = 0
        self._modes: set[bool] = set()
        self._trains_in_evaluation = False
        self._parts_were_called = False
        self._is_incomplete = False
        self._is_certain = True

    @property
    def stamp(self) -> Stamp:
        """The stamp of the open step, or of the next one."""
        stamp = self.counters.next
        return self._completing(stamp) if self._turns.incomplete else stamp

    def _completing(self, stamp: Stamp) -> Stamp:
        completed = self._turns.completed_by(stamp.global_step)
        return replace(stamp, completes=completed) if completed else stamp

    def pass_stamp(self, name: str) -> Stamp:
        """Return the stamp of a pass: that of the open step, or of the last one.

        A step that only calls of parts have opened does not count as open, because they are not seen at every step.
        """
        is_open = self.state is not State.IDLE and self._is_certain
        return self.counters.stamp(back=0 if is_open else 1, pass_name=name)

    @property
    def only_optimizer(self) -> int | None:
        """The optimizer that has made the last step, if it is the only one, and the next step can be like the last one.

        Then the next step opens with a call of the root in training mode, begins no epoch, and closes when this optimizer has stepped.
        """
        if self.state is not State.IDLE or self.pass_name != TRAINING or self.is_rootless or self._trains_in_evaluation:
            return None
        is_running = any(known.running for known in list(self.calls.values()))
        if self._turns.incomplete or self._modes or is_running or not self.counters.next.train_step:
            return None
        return self.optimizers.only(self._owners)

    # -- calls of the model ---------------------------------------------------------------------------------------

    @property
    def forwards_without_step(self) -> int:
        """Number of forwards before the first step; 0 after it."""
        return self._forwards_without_step or 0

    def forward_begins(
        self,
        thread: int,
        training: bool = True,
        gradients: bool = True,
        *,
        depth: int | None = None,
        running: Collection[int] = (),
        is_compiled: bool = False,
        is_dry: bool = False,
    ) -> tuple[Decision, ...]:
        """Handle the beginning of a call of a root.

        Parameters
        ----------
        thread : int
            Identifier of the thread.
        training, gradients : bool
            Whether the root is in training mode, and whether gradients are enabled.
        depth : int, optional
            Number of calls of roots that really run around this one, if the caller has looked:
            an interrupted call leaves no event.
        running : collection of int
            The optimizers whose steps run around this call.
        is_compiled : bool
            Whether the call is that of a compiled graph, which has no end.
        is_dry : bool
            Whether the inputs of the call are meaningless, so that it never counts.
        """
        known = self.calls[thread]
        if depth is not None:
            del known.running[depth:]
        if known.running:  # a call inside an outermost one has the same forward
            known.running.append(known.running[0])
            return ()
        forward, decisions = (None, ()) if is_dry else self._counted(training, gradients, running)
        if forward is not None:
            forward.is_compiled = is_compiled
        known.last = forward
        if not is_compiled:
            known.running.append(forward)
        return decisions

    def _counted(
        self, training: bool, gradients: bool, running: Collection[int]
    ) -> tuple[Forward | None, tuple[Decision, ...]]:
        if self.pass_name != TRAINING:
            return self._pass_forward, ()
        if gradients:
            self._modes.add(training)
        if not gradients or not (training or self._trains_in_evaluation):
            return None, ()
        self.is_rootless = self._is_incomplete = False
        decisions = self._prepare(running)
        if not self._is_certain:
            self._set_certain()
        return self.forwards.add(decisions), tuple(decisions)

    def counts(self, training: bool, gradients: bool) -> bool:
        """Whether a call outside any root belongs to what is recorded now."""
        return self.pass_name != TRAINING or (gradients and (training or self._trains_in_evaluation))

    def _set_certain(self) -> None:
        """Confirm the open step, which only calls of parts have opened."""
        self._is_certain = True
        self.counters.step_opened()

    def _prepare(self, running: Collection[int], is_certain: bool = True) -> list[Decision]:
        """Make sure that a step is open which a forward can belong to."""
        decisions: list[Decision] = []
        if self._forwards_without_step is not None:
            self._forwards_without_step += 1
        if not (running and self.optimizers.any_of(running)):
            if self.optimizers.running:
                decisions += self._forget_raised(has_closure=False)
            if self.state is State.STEPPED:
                decisions += self._close()
        if self.state is State.IDLE:
            decisions.append(self._open(is_certain))
        return decisions

    def forward_ends(self, thread: int) -> Forward | None:
        """Handle the end of a call of a root; return the forward if the call was an outermost one that counts."""
        running = self.calls[thread].running
        if not running:
            return None
        forward = running.pop()
        return None if running else forward

    def part_called(
        self,
        thread: int,
        training: bool = True,
        gradients: bool = True,
        running: Collection[int] = (),
        computed: bool = True,
    ) -> tuple[Forward | None, tuple[Decision, ...]]:
        """Handle the call of a module outside any root; return the forward that it belongs to, and decisions.

        Parameters
        ----------
        thread : int
            Identifier of the thread.
        training, gradients : bool
            Whether the module is in training mode, and whether gradients are enabled.
        running : collection of int
            The optimizers whose steps run around this call.
        computed : bool
            Whether anything was computed for a backward since the last step of an optimizer, this call included.
        """
        if not self.counts(training, gradients):
            return None, ()
        if self.pass_name != TRAINING:
            return self._pass_forward, ()
        if not self.is_rootless and self.state is State.IDLE:
            self._parts_were_called = True
            return None, ()
        decisions: list[Decision] = []
        latest = self.forwards.latest
        is_stepped = self.state is State.STEPPED
        if is_stepped and not computed:  # the next optimizer may share the step
            return None, ()
        is_first = latest is None or latest.reach is not Reach.NONE or self.state is not State.OPEN
        if is_stepped or (self.is_rootless and is_first):
            decisions = self._prepare(running, is_certain=False)
            latest = self.forwards.latest
        if latest is None or latest.reach is not Reach.NONE or not latest.is_of_parts:
            latest = self.forwards.add(decisions)
            latest.is_of_parts = True
        self.calls[thread].last = latest
        return latest, tuple(decisions)

    # -- gradients ------------------------------------------------------------------------------------------------

    def backward_reached(self, forward: Forward, captured: bool = False, is_kept: bool = False) -> tuple[Decision, ...]:
        """Handle a backward that has gone through a forward.

        Parameters
        ----------
        forward : Forward
            Which one.
        captured : bool
            Whether ``torch.autograd.grad`` returns the gradients of parameters, rather than adding them up.
        is_kept : bool
            Whether the backward keeps the graph.
        """
        forward.is_kept = is_kept
        reach = Reach.CAPTURED if captured else Reach.ACCUMULATED
        if forward.part < FIRST_PART or forward.reach >= reach:
            return ()
        was, forward.reach = forward.reach, reach
        return (Restarted((forward.provisional_part,)),) if was is Reach.CAPTURED else ()

    def provisional_counts(self, forward: Forward) -> tuple[Decision, ...]:
        """Handle the end of a backward that proves to have reached the parameters only now."""
        if forward.part < FIRST_PART:
            return ()
        forward.reach = Reach.ACCUMULATED
        return (Merged(forward.provisional_part, forward.part),)

    def gradients_cleared(self, reached: Forward | None = None) -> tuple[Decision, ...]:
        """Handle gradients that were thrown away: what they came from belongs to no step, unless an optimizer has used them.

        Parameters
        ----------
        reached : Forward, optional
            The forward through which a backward goes now.  What it and other forwards whose graph was kept have computed still counts.
        """
        if self.optimizers.stepped:
            return ()
        gone = self.forwards.reached
        if not gone and not self.forwards.earlier:
            return ()
        kept = () if reached is None else tuple(self.forwards.keep(reached))
        if not kept and self.state is State.OPEN:
            return self._skip(gone)
        gone = [f for f in gone if f.part not in kept]
        parts = tuple(part for f in gone for part in (f.part, f.provisional_part))
        self.forwards.discard(gone)
        provisional = tuple(part + 1 for part in kept)
        return (Restarted((*GRADIENT_PARTS, EARLIER_PART, *parts, *provisional), anew=kept),)

    def _skip(self, gone: list[Forward]) -> tuple[Decision, ...]:
        """End a step that no optimizer made; forwards that no backward has reached belong to the next one."""
        parts, of_inputs = self._counting_parts(), self.forwards.are_of_inputs(gone)
        self.forwards.discard(gone)
        carried = self.forwards.parts
        closed = Closed(self.stamp, True, parts, carried, of_inputs=of_inputs)
        if carried:
            return closed, Opened(self.stamp, is_carried=True)
        self._reset()
        return (closed,)

    # -- optimizers -----------------------------------------------------------------------------------------------

    def optimizer_begins(
        self,
        optimizer: int,
        owned: Collection[int],
        *,
        closure: bool = False,
        running: Collection[int] = (),
        computed: bool = False,
    ) -> tuple[Decision, ...]:
        """Handle the beginning of an optimizer's step.

        It does not count if the optimizer owns nothing of the model, or if it is part of another optimizer's step.

        Parameters
        ----------
        optimizer : int
            Identifier of the optimizer.
        owned : collection of int
            Identifiers of the parameters of the model that it owns.
        closure : bool
            Whether the optimizer evaluates the model itself.
        running : collection of int
            The optimizers whose steps run around this one, the innermost first, each as often as it calls itself.
        computed : bool
            Whether anything was computed for a backward since the last step of an optimizer.
        """
        owned = frozenset(owned)
        if self.pass_name != TRAINING or not owned:
            return ()
        decisions = self._forget_raised(closure, running) if self.optimizers.running else []
        if self.optimizers.running and self.optimizers.begin_inside(optimizer, owned, running):
            return tuple(decisions)
        if optimizer in self.optimizers.stepped or (self.state is State.STEPPED and (computed or closure)):
            decisions += self._close()
        if self.state is State.IDLE:
            self._open_late(closure)
            decisions.append(self._open())
        if not self._is_certain:
            self._set_certain()
        self.optimizers.running[optimizer] = RunningStep(owned, has_closure=closure)
        self.state = State.STEPPING
        return tuple(decisions)

    def _forget_raised(self, has_closure: bool, running: Collection[int] = ()) -> list[Decision]:
        """Forget steps that raised: they have no end of their own."""
        if not self.optimizers.forget_others(running):
            return []
        has_stepped = bool(self.optimizers.stepped)
        self.state = State.STEPPED if has_stepped else State.OPEN
        if has_stepped:
            return self._close()
        if has_closure:
            closed = Closed(self.stamp, True, self._counting_parts())
            self._reset()
            return [closed]
        return [Restarted((), parameters=True)]

    def _open_late(self, closure: bool) -> None:
        """Learn from a step that its optimizer opens: the model is not called as a whole, or only in the closure."""
        self._is_incomplete = closure and self._parts_were_called
        if self._is_incomplete or not closure:
            self.is_rootless = True

    def optimizer_ends(
        self, optimizer: int, owners: Collection[int] = (), covered: bool = True
    ) -> tuple[Decision, ...]:
        """Handle the end of an optimizer's step.

        The step of the training loop is over if all owners have stepped.  If they do not own everything that can be trained,
        it must also have been so in the step before, since optimizers may exist that are not known yet.

        Parameters
        ----------
        optimizer : int
            Identifier of the optimizer.
        owners : collection of int
            All optimizers that own parameters of the model.
        covered : bool
            Whether they own everything that can be trained.
        """
        if not self.optimizers.end(optimizer):
            return ()
        self.state = State.STEPPING if self.optimizers.running else State.STEPPED
        self._owners = owners
        if self.optimizers.have_all_stepped(owners, covered):
            return tuple(self._close())
        if self.state is State.STEPPING:
            return ()
        return (Awaited(self._completing(self.counters.stamp(back=-1))),)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _open(self, is_certain: bool = True) -> Opened:
        self.state, self._is_certain = State.OPEN, is_certain
        return Opened(self.stamp, self.counters.step_opened(is_certain))

    def _counting_parts(self) -> tuple[int, ...]:
        """Return the parts whose gradients are there."""
        return GRADIENT_PARTS if self._is_incomplete else self.forwards.counting()[0]

    def _close(self) -> list[Decision]:
        """Close the open step."""
        stepped, (parts, micro_batches) = frozenset(self.optimizers.stepped), self.forwards.counting()
        closed = Closed(
            self.stamp,
            False,
            GRADIENT_PARTS if self._is_incomplete else parts,
            optimizers=stepped,
            micro_batches=micro_batches,
        )
        if self._modes:
            self._trains_in_evaluation = self._modes == {False}
            self._modes.clear()
        self._forwards_without_step = None
        if len(self._owners) > 1 or self._turns.incomplete:
            self._turns.step_closed(self.counters.next, stepped, self._owners)
        self.counters.step_closed()
        self.optimizers.stepped_before = stepped
        self._reset()
        is_full = self.counters.steps_per_epoch is not None and self.counters.steps_left <= 0
        return [closed, *(self._finish_epoch() if is_full else ())]

    def _reset(self) -> None:
        self.state = State.IDLE
        self.forwards.clear()
        self.optimizers.stepped.clear()
        self._parts_were_called = self._is_incomplete = False

    def close_pending(self) -> tuple[Decision, ...]:
        """Close the open step if an optimizer has stepped in it."""
        return tuple(self._close()) if self.state is State.STEPPED else ()

    def step_by_hand(self, computed: bool = False) -> tuple[Decision, ...]:
        """Handle the end of a step that no optimizer makes.

        Parameters
        ----------
        computed : bool
            Whether anything was computed for a backward since the last step; otherwise only an open step ends.
        """
        if self.state is not State.IDLE:
            return tuple(self._close())
        if not computed:
            return ()
        self.is_rootless = True
        return self._open(), *self._close()

    def finish(self) -> tuple[Decision, ...]:
        """Close the open step if an optimizer has stepped in it, and abandon it otherwise."""
        if decisions := self.close_pending():
            return decisions
        if self.state is State.IDLE:
            return ()
        self.optimizers.running.clear()
        self._reset()
        return (Abandoned(),)

    def abandon(self) -> None:
        """Forget the open step in whatever state an exception has left it; the next step gets its number."""
        self.optimizers.running.clear()
        self._modes.clear()
        self._reset()

    # -- passes and epochs ----------------------------------------------------------------------------------------

    def pass_begins(self, name: str) -> tuple[Decision, ...]:
        """Handle the beginning of another pass over data; an open step waits."""
        decisions = self.close_pending()
        self.pass_name = name
        return decisions

    def pass_ends(self) -> None:
        """Handle the end of a pass: training goes on."""
        self.pass_name = TRAINING

    def epoch_ends(self) -> tuple[Decision, ...]:
        """Handle the end of an epoch, unless the epoch has ended already, after ``steps_per_epoch`` steps."""
        decisions = list(self.close_pending())
        if self.counters.epoch_has_begun:
            decisions += self._finish_epoch()
        return tuple(decisions)

    def _finish_epoch(self) -> tuple[Decision, ...]:
        finished = EpochFinished(self.pass_stamp(TRAINING))
        self.counters.epoch_closed()
        return (finished,)
