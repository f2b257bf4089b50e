"""A state machine that says which optimizer step the training loop is in, and which forwards belong to it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ikkuna.errors import ConfigError
from ikkuna.export.messages.stamp import TRAINING, Stamp
from ikkuna.export.steps.decisions import Abandoned, Closed, Decision, EpochFinished, Merged, Opened, Restarted
from ikkuna.export.steps.forward import (
    EARLIER_PART,
    FIRST_PART,
    MICRO_PART,
    STEP_PART,
    UNCLIPPED_PART,
    Forward,
    Reach,
)

__all__ = ["MAX_PENDING", "State", "StepTracker"]

MAX_PENDING = 16
"""Forwards that are kept apart while no backward has reached them; beyond that the oldest two share a part."""

_GRADIENT_PARTS = (UNCLIPPED_PART, MICRO_PART)


class State(Enum):
    """Where the training loop is."""

    IDLE = "no step is open"
    OPEN = "forwards are recorded, and no optimizer has stepped"
    STEPPING = "the step of an optimizer is running"
    STEPPED = "an optimizer has stepped, and others may follow"


@dataclass(slots=True)
class _Thread:
    """Calls that run on one thread.

    Parameters
    ----------
    calls : list of Forward or None
        The running calls of roots, the outermost first; ``None`` for a call that does not count.
    last : Forward, optional
        The last outermost call, if it counts.
    """

    calls: list[Forward | None] = field(default_factory=list)
    last: Forward | None = None


@dataclass(slots=True)
class _Running:
    """The running step of an optimizer."""

    owned: frozenset[int]
    depth: int = 1
    has_closure: bool = False


class StepTracker:
    """Counts optimizer steps, and decides which forwards belong to which step.

    A step opens with an outermost call of the model in training mode with gradients, or with an optimizer's step.
    It closes when every optimizer that owns parameters of the model has stepped, at the latest at the next forward.
    A forward belongs to a step if its gradients were there when the step's optimizers used them: forwards without a backward,
    and forwards whose gradients were cleared, as a closure does before each evaluation, belong to none.

    If all forwards of a step ran in evaluation mode, forwards in evaluation mode count from the next step on,
    until a step has one in training mode.  If a model is never called as a whole, calls of its parts count as its forwards
    from the second step on.

    Each method takes an event and returns decisions in the order in which they are to be carried out.

    Examples
    --------
    >>> tracker = StepTracker()
    >>> tracker.forward_begins(thread=0)
    (Opened(stamp=Stamp(global_step=0, train_step=0, epoch=0, pass_name='training'), starts_epoch=True, is_carried=False),)
    >>> forward = tracker.forward_ends(thread=0)
    >>> tracker.backward_reached(forward), tracker.optimizer_begins(1, owned={7})
    ((), ())
    >>> tracker.optimizer_ends(1, owners={1})
    (Closed(stamp=Stamp(global_step=0, train_step=0, epoch=0, pass_name='training'), skipped=False, parts=(1, 3, 4), carried=()),)
    """

    def __init__(self) -> None:
        self.state = State.IDLE
        # of steps, of steps in this epoch, and of epochs; one object, so that no exception comes between two assignments
        self._counters = 0, 0, 0
        self.pass_name = TRAINING
        self.steps_per_epoch: int | None = None
        self.is_rootless = False
        self._forwards_without_step: int | None = 0
        self._epoch_is_open = False
        self._threads: dict[int, _Thread] = {}
        self._pending: list[Forward] = []
        self._has_earlier = False
        self._pool: list[Forward] = []
        self._used = 0
        self._pass_forward = Forward(STEP_PART)
        self._stepped: set[int] = set()
        self._last_stepped: set[int] = set()
        self._running: dict[int, _Running] = {}
        self._modes: set[bool] = set()
        self._trains_in_evaluation = False
        self._parts_were_called = False
        self._is_incomplete = False

    # -- stamps ---------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Number of steps."""
        return self._counters[0]

    @property
    def train_step(self) -> int:
        """Number of steps in this epoch."""
        return self._counters[1]

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self._counters[2]

    @property
    def stamp(self) -> Stamp:
        """The stamp of the open step, or of the next one."""
        return Stamp(*self._counters)

    def pass_stamp(self, name: str) -> Stamp:
        """Return the stamp of a pass: that of the open step, or of the last one."""
        back = 1 if self.state is State.IDLE else 0
        return Stamp(max(self.global_step - back, 0), max(self.train_step - back, 0), self.epoch, name)

    # -- calls of the model ---------------------------------------------------------------------------------------

    def calls(self, thread: int) -> Sequence[Forward | None]:
        """Return the forward of each running call of a root on a thread; ``None`` for a call that does not count."""
        known = self._threads.get(thread)
        return known.calls if known is not None else ()

    def last_forward(self, thread: int) -> Forward | None:
        """Return the running forward of a thread or else its last one; ``None`` if it does not count."""
        known = self._threads.get(thread)
        return known.last if known is not None else None

    @property
    def forwards_without_step(self) -> int:
        """Number of forwards before the first step; 0 after it."""
        return self._forwards_without_step or 0

    @property
    def latest(self) -> Forward | None:
        """The forward that began last among those of the open step."""
        return self._pending[-1] if self._pending else None

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
        known = self._threads.setdefault(thread, _Thread())
        if depth is not None:
            del known.calls[depth:]
        if known.calls:
            known.calls.append(known.calls[0])
            return ()
        forward, decisions = (None, ()) if is_dry else self._counted(training, gradients, running)
        if forward is not None:
            forward.is_compiled = is_compiled
        known.last = forward
        if not is_compiled:
            known.calls.append(forward)
        return decisions

    def _counted(
        self, training: bool, gradients: bool, running: Collection[int]
    ) -> tuple[Forward | None, tuple[Decision, ...]]:
        if self.pass_name != TRAINING:
            return self._pass_forward, ()
        if gradients:
            self._modes.add(training)
        if not self.counts(training, gradients):
            return None, ()
        self.is_rootless = self._is_incomplete = False
        decisions = self._prepare(running)
        return self._new_forward(decisions), tuple(decisions)

    def counts(self, training: bool, gradients: bool) -> bool:
        """Whether a call outside any root belongs to what is recorded now."""
        return self.pass_name != TRAINING or (gradients and (training or self._trains_in_evaluation))

    def _prepare(self, running: Collection[int]) -> list[Decision]:
        """Make sure that a step is open which a forward can belong to."""
        decisions: list[Decision] = []
        if self._forwards_without_step is not None:
            self._forwards_without_step += 1
        if not any(optimizer in self._running for optimizer in running):
            decisions += self._forget_raised(has_closure=False)
            if self.state is State.STEPPED:
                decisions += self._close()
        if self.state is State.IDLE:
            decisions.append(self._open())
        return decisions

    def _new_forward(self, decisions: list[Decision]) -> Forward:
        for forward in [f for f in self._pending if f.reach is Reach.ACCUMULATED]:
            decisions.append(Merged(forward.part, EARLIER_PART))
            self._has_earlier = True
            self._pending.remove(forward)
            forward.part = EARLIER_PART
        if len(self._pending) >= MAX_PENDING:
            oldest, second = self._pending[:2]
            decisions.append(Merged(oldest.part, second.part))
            self._pending.remove(oldest)
            oldest.part = second.part
        taken = {f.part for f in self._pending}
        part = next(p for p in range(FIRST_PART, FIRST_PART + 2 * MAX_PENDING + 2, 2) if p not in taken)
        if self._used == len(self._pool):
            self._pool.append(Forward(part))
        forward = self._pool[self._used]
        self._used += 1
        forward.part, forward.reach = part, Reach.NONE
        forward.is_compiled = forward.is_of_parts = False
        self._pending.append(forward)
        return forward

    def forward_ends(self, thread: int) -> Forward | None:
        """Handle the end of a call of a root; return the forward if the call was an outermost one that counts."""
        known = self._threads.get(thread)
        if known is None or not known.calls:
            return None
        forward = known.calls.pop()
        return forward if not known.calls else None

    def part_called(
        self, thread: int, training: bool = True, gradients: bool = True, running: Collection[int] = ()
    ) -> tuple[Forward | None, tuple[Decision, ...]]:
        """Handle the call of a module outside any root; return the forward that it belongs to, and decisions."""
        if not self.counts(training, gradients):
            return None, ()
        if self.pass_name != TRAINING:
            return self._pass_forward, ()
        if not self.is_rootless and self.state is State.IDLE:
            self._parts_were_called = True
            return None, ()
        decisions: list[Decision] = []
        latest = self.latest
        if self.is_rootless and not (latest is not None and latest.reach is Reach.NONE and self.state is State.OPEN):
            decisions = self._prepare(running)
            latest = self.latest
        if latest is None or latest.reach is not Reach.NONE or not latest.is_of_parts:
            latest = self._new_forward(decisions)
            latest.is_of_parts = True
        self._threads.setdefault(thread, _Thread()).last = latest
        return latest, tuple(decisions)

    # -- gradients ------------------------------------------------------------------------------------------------

    @property
    def latest_compiled(self) -> Forward | None:
        """The latest forward of a compiled graph that no backward has reached."""
        waiting = (f for f in reversed(self._pending) if f.is_compiled and f.reach is Reach.NONE)
        return next(waiting, None)

    def backward_reached(self, forward: Forward, captured: bool = False) -> tuple[Decision, ...]:
        """Handle a backward that has gone through a forward.

        Parameters
        ----------
        forward : Forward
            Which one.
        captured : bool
            Whether ``torch.autograd.grad`` returns the gradients of parameters, rather than adding them up.
        """
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

    def gradients_cleared(self) -> tuple[Decision, ...]:
        """Handle gradients that were thrown away: what they came from belongs to no step."""
        gone = [f for f in self._pending if f.reach is not Reach.NONE]
        if not gone and not self._has_earlier:
            return ()
        if self.state is State.OPEN:
            return self._skip(gone)
        parts = tuple(part for f in gone for part in (f.part, f.provisional_part))
        self._forget(gone)
        return (Restarted((*_GRADIENT_PARTS, EARLIER_PART, *parts)),)

    def _skip(self, gone: list[Forward]) -> tuple[Decision, ...]:
        """End a step that no optimizer made; forwards that no backward has reached belong to the next one."""
        parts = self._counting_parts()
        self._forget(gone)
        carried = tuple(part for f in self._pending for part in (f.part, f.provisional_part))
        closed = Closed(self.stamp, True, parts, carried)
        if carried:
            return closed, Opened(self.stamp, is_carried=True)
        self._reset()
        return (closed,)

    def _forget(self, gone: list[Forward]) -> None:
        for forward in gone:
            self._pending.remove(forward)
            forward.part = -1
        self._has_earlier = False

    # -- optimizers -----------------------------------------------------------------------------------------------

    @property
    def in_closure(self) -> bool:
        """Whether an optimizer is stepping that evaluates the model itself."""
        return any(running.has_closure for running in self._running.values())

    def optimizer_begins(
        self, optimizer: int, owned: Collection[int], *, closure: bool = False, running: Collection[int] = ()
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
        """
        owned = frozenset(owned)
        if self.pass_name != TRAINING or not owned:
            return ()
        decisions = self._forget_raised(closure, running)
        depth = sum(other == optimizer for other in running)
        if optimizer in self._running:
            self._running[optimizer].depth = depth + 1
            return tuple(decisions)
        if any(owned <= self._running[outer].owned for outer in running if outer in self._running):
            return tuple(decisions)
        if optimizer in self._stepped:
            decisions += self._close()
        if self.state is State.IDLE:
            self._open_late(closure)
            decisions.append(self._open())
        self._running[optimizer] = _Running(owned, has_closure=closure)
        self.state = State.STEPPING
        return tuple(decisions)

    def _forget_raised(self, has_closure: bool, running: Collection[int] = ()) -> list[Decision]:
        """Forget steps that raised: they have no end of their own."""
        raised = [optimizer for optimizer in self._running if optimizer not in running]
        if not raised:
            return []
        for optimizer in raised:
            del self._running[optimizer]
        if self._running:
            return []
        self.state = State.STEPPED if self._stepped else State.OPEN
        if self._stepped:
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
        running = self._running.get(optimizer)
        if running is None:
            return ()
        running.depth -= 1
        if running.depth:
            return ()
        del self._running[optimizer]
        self._stepped.add(optimizer)
        self.state = State.STEPPING if self._running else State.STEPPED
        is_complete = len(self._stepped) >= len(owners) and self._stepped.issuperset(owners)
        if self._running or not is_complete or not (covered or self._stepped == self._last_stepped):
            return ()
        return tuple(self._close())

    @property
    def optimizers_stepped(self) -> int:
        """Number of optimizers that have stepped in the open step."""
        return len(self._stepped)

    def is_stepping(self, optimizer: int) -> bool:
        """Whether a step of this optimizer that counts is running, and is not inside another call of itself."""
        return optimizer in self._running and self._running[optimizer].depth == 1

    # -- steps ----------------------------------------------------------------------------------------------------

    def _open(self) -> Opened:
        self.state = State.OPEN
        starts_epoch, self._epoch_is_open = not self._epoch_is_open, True
        return Opened(self.stamp, starts_epoch)

    def _counting_parts(self) -> tuple[int, ...]:
        """Return the parts whose gradients are there."""
        if self._is_incomplete:
            return _GRADIENT_PARTS
        parts = [*_GRADIENT_PARTS, EARLIER_PART] if self._has_earlier else [*_GRADIENT_PARTS]
        used = [f for f in self._pending if f.reach is not Reach.NONE]
        if not used and not self._has_earlier:
            used = self._pending  # the backward could not be seen
        for forward in used:
            parts.append(forward.part)
            if forward.reach is Reach.CAPTURED:
                parts.append(forward.provisional_part)
        return tuple(parts)

    def _close(self) -> list[Decision]:
        """Close the open step."""
        closed = Closed(self.stamp, False, self._counting_parts())
        if self._modes:
            self._trains_in_evaluation = self._modes == {False}
            self._modes.clear()
        self._forwards_without_step = None
        global_step, train_step, epoch = self._counters
        self._counters = global_step + 1, train_step + 1, epoch
        self._last_stepped = set(self._stepped)
        self._reset()
        is_full = self.steps_per_epoch is not None and self.train_step >= self.steps_per_epoch
        return [closed, *(self._finish_epoch() if is_full else ())]

    def _reset(self) -> None:
        self.state = State.IDLE
        self._forget(list(self._pending))
        for forward in self._pool[: self._used]:
            forward.part = -1
        self._used = 0
        self._stepped.clear()
        self._parts_were_called = self._is_incomplete = False

    def close_pending(self) -> tuple[Decision, ...]:
        """Close the open step if an optimizer has stepped in it."""
        return tuple(self._close()) if self.state is State.STEPPED else ()

    def step_by_hand(self) -> tuple[Decision, ...]:
        """Handle the end of a step that no optimizer makes."""
        return tuple(self._close()) if self.state is not State.IDLE else ()

    def finish(self) -> tuple[Decision, ...]:
        """Close the open step if an optimizer has stepped in it, and abandon it otherwise."""
        if decisions := self.close_pending():
            return decisions
        if self.state is State.IDLE:
            return ()
        self._running.clear()
        self._reset()
        return (Abandoned(),)

    def abandon(self) -> None:
        """Forget the open step in whatever state an exception has left it; the next step gets its number."""
        self._running.clear()
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
        if self._epoch_is_open or self.train_step:
            decisions += self._finish_epoch()
        return tuple(decisions)

    def _finish_epoch(self) -> tuple[Decision, ...]:
        finished = EpochFinished(self.pass_stamp(TRAINING))
        self._counters = self.global_step, 0, self.epoch + 1
        self._epoch_is_open = False
        return (finished,)

    def set_steps_per_epoch(self, steps: int | None) -> None:
        """Set the number of steps after which an epoch ends by itself.

        Raises
        ------
        ConfigError
            If `steps` is neither ``None`` nor a positive int.
        """
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ConfigError(f"steps_per_epoch must be an int >= 1 or None, got {steps!r}")
        self.steps_per_epoch = steps

    def state_dict(self) -> dict[str, int]:
        """Return the counters, to be saved with a checkpoint."""
        return {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}

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
        self._counters = state["global_step"], state["train_step"], state["epoch"]
