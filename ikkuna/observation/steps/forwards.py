"""Forwards, running calls and optimizers of the open step, the decisions about them, and the evaluations of the loop."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from ikkuna.metrics.messages.stamp import Stamp


@dataclass(frozen=True, slots=True)
class Opened:
    """A step begins.

    Parameters
    ----------
    stamp : Stamp
        Of the step.
    starts_epoch : bool
        Whether it is the first step of its epoch.
    is_carried : bool
        Whether it contains parts that the step before has carried over.
    """

    stamp: Stamp
    starts_epoch: bool = False
    is_carried: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """Measurements of one part now belong to another part."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The measurements of some parts belong to no step; `parameters` if those of the parameters do not either.

    Of the parts `anew` this holds for what a backward has added to them, because another one goes through the same forwards.
    """

    parts: tuple[int, ...]
    parameters: bool = False
    anew: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """A step is over.

    Parameters
    ----------
    stamp : Stamp
        Of the step.
    skipped : bool
        Whether no optimizer has stepped; the next step gets the same number.
    parts : tuple of int
        Parts that belong to the step; all others are discarded, except `carried`.
    carried : tuple of int
        Parts that belong to the step that opens next.
    optimizers : frozenset of int
        The optimizers that have stepped.
    micro_batches : int
        Number of forwards whose gradients a backward has added up; 0 if no backward could be seen.
    of_inputs : bool
        Whether all gradients that a skipped step has thrown away are those of forwards whose inputs took gradients.
    """

    stamp: Stamp
    skipped: bool = False
    parts: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    optimizers: frozenset[int] = frozenset()
    micro_batches: int = 0
    of_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Awaited:
    """The open step is complete unless another optimizer shares it; a call of a part may open the next one, `stamp`."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The open step ends without a message."""


@dataclass(frozen=True, slots=True)
class EpochFinished:
    """An epoch is over; `stamp` is that of its last step."""

    stamp: Stamp


Decision = Opened | Merged | Restarted | Closed | Awaited | Abandoned | EpochFinished


STEP_PART, UNCLIPPED_PART, EARLIER_PART, MICRO_PART, FIRST_PART = 0, 1, 2, 3, 4
"""Parts of a step: parameters; gradients before clipping; earlier micro-batches; gradients of micro-batches; the first forward."""

GRADIENT_PARTS = (UNCLIPPED_PART, MICRO_PART)


class Reach(IntEnum):
    """Use of the gradients of a forward."""

    NONE = 0
    CAPTURED = 1
    """``torch.autograd.grad`` returned gradients of parameters."""
    ACCUMULATED = 2
    """A backward added to the gradients of parameters."""


@dataclass(slots=True, eq=False)
class Forward:
    """An outermost call of the model.

    Parameters
    ----------
    part : int
        Part of the recorder that holds its measurements; the next number holds gradients of a backward that may not count.
        -1 after the forward was discarded.
    number : int
        The number of the forward in its step; -1 in another pass.
    reach : Reach
        What its gradients were used for.
    is_compiled : bool
        Whether it ran in a compiled graph.
    is_of_parts : bool
        Whether it consists of calls of modules outside any root.
    began : int
        The number of the first node that autograd records in it.
    of_inputs : bool
        Whether its inputs take gradients, as in an attack on them, or if another network has computed them.
    is_kept : bool
        Whether the last backward through it has kept its graph, so that another one can follow.
    """

    part: int
    number: int = -1
    reach: Reach = Reach.NONE
    is_compiled: bool = False
    is_of_parts: bool = False
    began: int = 0
    of_inputs: bool = False
    is_kept: bool = False

    @property
    def provisional_part(self) -> int:
        """The part that holds gradients of a backward that may not count."""
        return self.part + 1 if self.part >= 0 else -1


MAX_PENDING = 16
"""Forwards that are kept apart while no backward has reached them; beyond that the oldest two share a part."""


class PendingForwards:
    """The forwards of the open step, in the order in which they began.

    Forwards that a backward has reached are merged into one part when the next forward begins.

    Attributes
    ----------
    earlier : int
        Number of forwards that were merged.

    Examples
    --------
    >>> pending = PendingForwards()
    >>> first, second = pending.add([]), pending.add([])
    >>> first.part, second.part
    (4, 6)
    >>> first.reach = Reach.ACCUMULATED
    >>> pending.counting()
    ((1, 3, 4), 1)
    """

    def __init__(self) -> None:
        self._pending: list[Forward] = []
        self._pool: list[Forward] = []
        self._used = 0
        self.earlier = self._earlier_of_model = 0

    @property
    def latest(self) -> Forward | None:
        """The forward that began last."""
        return self._pending[-1] if self._pending else None

    @property
    def latest_compiled(self) -> Forward | None:
        """The latest forward of a compiled graph that no backward has reached."""
        waiting = (f for f in reversed(self._pending) if f.is_compiled and f.reach is Reach.NONE)
        return next(waiting, None)

    @property
    def reached(self) -> list[Forward]:
        """The forwards that a backward has reached."""
        return [f for f in self._pending if f.reach is not Reach.NONE] if self._pending else []

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of all pending forwards."""
        return tuple(part for f in self._pending for part in (f.part, f.provisional_part))

    def add(self, decisions: list[Decision]) -> Forward:
        """Add a forward, and append to `decisions` which parts are merged before."""
        for forward in [f for f in self._pending if f.reach is Reach.ACCUMULATED] if self._pending else ():
            decisions.append(Merged(forward.part, EARLIER_PART))
            self.earlier += 1
            self._earlier_of_model += not forward.of_inputs
            self._pending.remove(forward)
            forward.part = EARLIER_PART
        if len(self._pending) >= MAX_PENDING:
            oldest, second = self._pending[:2]
            decisions.append(Merged(oldest.part, second.part))
            self._pending.remove(oldest)
            oldest.part = second.part
        part = FIRST_PART  # one that no pending forward has
        if self._pending:
            taken = {f.part for f in self._pending}
            part = next(p for p in range(FIRST_PART, FIRST_PART + 2 * MAX_PENDING + 2, 2) if p not in taken)
        if self._used == len(self._pool):
            self._pool.append(Forward(part, self._used))
        forward = self._pool[self._used]
        self._used += 1
        forward.part, forward.reach = part, Reach.NONE
        forward.is_compiled = forward.is_of_parts = forward.of_inputs = forward.is_kept = False
        self._pending.append(forward)
        return forward

    def discard(self, forwards: list[Forward]) -> None:
        """Discard forwards, and those that were merged."""
        for forward in forwards:
            self._pending.remove(forward)
            forward.part = -1
        self.earlier = self._earlier_of_model = 0

    def are_of_inputs(self, gone: list[Forward]) -> bool:
        """Return whether the inputs of these forwards, and of all that were merged, take gradients."""
        return not self._earlier_of_model and all(forward.of_inputs for forward in gone)

    def keep(self, reached: Forward) -> list[int]:
        """Let no backward have reached `reached` and the forwards whose graph was kept; return their parts, if any had been."""
        kept = [f for f in self.reached if f.is_kept or f is reached]
        for forward in kept:
            forward.reach = Reach.NONE
        return [forward.part for forward in kept]

    def clear(self) -> None:
        """Discard all forwards at the end of a step, so that their objects can be used again."""
        self._pending.clear()
        for forward in self._pool[: self._used]:
            forward.part = -1
        self._used = self.earlier = self._earlier_of_model = 0

    def counting(self) -> tuple[tuple[int, ...], int]:
        """Return the parts whose gradients are there, and the number of forwards whose gradients a backward has added up."""
        parts = [*GRADIENT_PARTS, EARLIER_PART] if self.earlier else [*GRADIENT_PARTS]
        micro_batches, is_seen = self.earlier, bool(self.earlier)
        for forward in self._pending:
            if forward.reach is not Reach.NONE:
                is_seen = True
                micro_batches += forward.reach is Reach.ACCUMULATED
                parts.append(forward.part)
                if forward.reach is Reach.CAPTURED:
                    parts.append(forward.provisional_part)
        if not is_seen:  # the backward could not be seen
            parts += [forward.part for forward in self._pending]
        return tuple(parts), micro_batches


@dataclass(slots=True)
class ThreadCalls:
    """Calls of roots on one thread.

    Parameters
    ----------
    running : list of Forward or None
        The running calls, the outermost first; ``None`` for a call that does not count.
    last : Forward, optional
        The last outermost call, or that which runs, if it counts.
    """

    running: list[Forward | None] = field(default_factory=list)
    last: Forward | None = None


_REMEMBERED = 64
"""An optimizer that has not stepped in so many steps is not waited for."""


@dataclass(slots=True)
class RunningStep:
    """The running step of an optimizer."""

    owned: frozenset[int]
    depth: int = 1
    has_closure: bool = False


_HAS_CLOSURE = attrgetter("has_closure")


class RunningOptimizers:
    """Which optimizers are stepping, and which have stepped.

    Attributes
    ----------
    running : dict
        The steps that count and are running, by optimizer, with the number of calls of that optimizer.
    stepped : set of int
        The optimizers that have stepped in the open step.
    stepped_before : frozenset of int
        Those that have stepped in the step before.

    Examples
    --------
    >>> optimizers = RunningOptimizers()
    >>> optimizers.running[1] = RunningStep(frozenset({7}))
    >>> optimizers.end(1), optimizers.stepped
    (True, {1})
    """

    def __init__(self) -> None:
        self.running: dict[int, RunningStep] = {}
        self.stepped: set[int] = set()
        self.stepped_before: frozenset[int] = frozenset()

    @property
    def in_closure(self) -> bool:
        """Whether an optimizer is stepping that evaluates the model itself."""
        return any(map(_HAS_CLOSURE, self.running.values()))

    def is_stepping(self, optimizer: int) -> bool:
        """Whether a step of this optimizer that counts is running, and is not inside another call of itself."""
        return optimizer in self.running and self.running[optimizer].depth == 1

    def any_of(self, optimizers: Collection[int]) -> bool:
        """Whether one of these optimizers is stepping."""
        return not self.running.keys().isdisjoint(optimizers)

    def begin_inside(self, optimizer: int, owned: frozenset[int], around: Collection[int]) -> bool:
        """Return whether a step is part of a step that is running already, of the same optimizer or of one that owns as much.

        Parameters
        ----------
        optimizer : int
            Identifier of the optimizer.
        owned : frozenset of int
            Identifiers of its parameters.
        around : collection of int
            The optimizers whose steps run around this one, each as often as it calls itself.
        """
        if optimizer in self.running:
            self.running[optimizer].depth = sum(other == optimizer for other in around) + 1
            return True
        return bool(around) and any(owned <= self.running[outer].owned for outer in around if outer in self.running)

    def end(self, optimizer: int) -> bool:
        """Return whether the step of an optimizer has ended, not only an inner call of itself."""
        running = self.running.get(optimizer)
        if running is None:
            return False
        running.depth -= 1
        if running.depth:
            return False
        del self.running[optimizer]
        self.stepped.add(optimizer)
        return True

    def forget_others(self, running: Collection[int]) -> bool:
        """Forget steps that are not among `running`, since they have raised; return whether there were some and none is left."""
        raised = [optimizer for optimizer in self.running if optimizer not in running]
        for optimizer in raised:
            del self.running[optimizer]
        return bool(raised) and not self.running

    def have_all_stepped(self, owners: Collection[int], covered: bool) -> bool:
        """Whether nothing runs and all owners have stepped.

        If the owners do not own everything that can be trained, the same optimizers must have stepped in the step before,
        since there may be optimizers that are not known yet.
        """
        if self.running or len(self.stepped) < len(owners) or not self.stepped.issuperset(owners):
            return False
        return covered or self.stepped == self.stepped_before

    def only(self, owners: Collection[int]) -> int | None:
        """Return the only owner, if it alone has stepped in the last step and nothing runs."""
        if self.running or len(owners) != 1 or self.stepped_before != set(owners):
            return None
        return next(iter(owners))


@dataclass(slots=True)
class _Incomplete:
    """A step since which `missing` optimizers have not stepped.

    At most `left` steps complete its samples, those before `end` if an optimizer is expected there.
    """

    stamp: Stamp
    missing: frozenset[int]
    end: int
    left: int


class OptimizerTurns:
    """The steps whose samples later steps complete, because not all optimizers have stepped in them.

    If a step is sampled, the following ones are too until each of `k` optimizers has stepped, at most ``2 * k`` steps altogether.
    If an optimizer is expected later than that, because it steps at equal distances, its next step is sampled in place of these.
    All of this depends only on the steps of optimizers, so that all ranks agree.

    Examples
    --------
    >>> turns, critic, generator = OptimizerTurns(), 1, 2
    >>> for step, optimizer in enumerate([critic, generator, critic]):
    ...     turns.step_closed(Stamp(step, step, 0), {optimizer}, {critic, generator})
    >>> turns.completed_by(3)
    (Stamp(global_step=2, train_step=2, epoch=0, pass_name='training'),)
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self.incomplete: list[_Incomplete] = []

    def completed_by(self, step: int) -> tuple[Stamp, ...]:
        """Return the earlier steps whose samples the step of this number completes."""
        return tuple([each.stamp for each in self.incomplete if self._completes(step, each)])

    def _completes(self, step: int, earlier: _Incomplete) -> bool:
        expected = [self._expected.get(each, 0) for each in earlier.missing]
        return earlier.left > 0 and (step in expected or max(step, min(expected)) < earlier.end)

    def step_closed(self, stamp: Stamp, stepped: Collection[int], owners: Collection[int]) -> None:
        """Handle the end of a step.

        Parameters
        ----------
        stamp : Stamp
            Of the step.
        stepped : collection of int
            The optimizers that have stepped in it.
        owners : collection of int
            The living optimizers of the model; until each has stepped once, only the first step waits for those that have not.
        """
        step, owners = stamp.global_step, {*owners, *stepped}
        for each in self.incomplete:
            each.left -= self._completes(step, each)
        last = {o: s for o, s in self._last.items() if o in owners and step - s <= _REMEMBERED}
        known = {*last, *stepped} if last else owners
        self._expected = {o: 2 * step - last[o] if o in stepped else e for o, e in self._expected.items() if o in last}
        self._expected |= {o: 2 * step - last[o] for o in stepped if o in last}
        self._last = last | dict.fromkeys(stepped, step)
        most = 2 * len(known)
        self.incomplete.append(_Incomplete(stamp, frozenset(known), step + most, most - 1))
        for each in self.incomplete:
            each.missing = (each.missing & owners) - set(stepped)
        self.incomplete = [i for i in self.incomplete if i.missing and step - i.stamp.global_step < _REMEMBERED]


_FEWEST = 2
_APART = 10


class LoopEvents:
    """Counts evaluation passes of the training loop by the mode of their forwards.

    A pass is a sequence of at least 2 outermost forwards without gradients, with no training forward and no step between them.
    It counts as an evaluation if the last forward without gradients before it is at least 10 steps ago: a loop that needs such
    forwards for its steps makes them more often, as for a target network, a generator, a teacher, or a reentrant checkpoint.

    Each method takes an event; the facts can be read at any time.  An event that was not seen changes nothing but the facts about it.

    Attributes
    ----------
    in_training_mode : int
        Number of evaluations in which every forward was in training mode.
    in_evaluation_mode : int
        Number of passes, also frequent ones and those of one forward, that had a forward in evaluation mode.
    repeated : int
        Number of those of them that had at least 2 forwards.
    thrown_away : int
        Number of gradients that were cleared before a step, in a row behind others of the same weights.
    has_forwards : bool
        Whether there was an outermost forward.

    Examples
    --------
    >>> events = LoopEvents()
    >>> for step in range(40):
    ...     events.forward(step, training=True, is_of_training=True)
    ...     if step % 20 == 19:
    ...         for _ in range(3):
    ...             events.forward(step + 1, training=True, is_of_training=False)
    >>> events.forward(40, training=True, is_of_training=True)
    >>> events.in_training_mode, events.in_evaluation_mode
    (2, 0)
    """

    __slots__ = (
        *("_forwards", "_is_apart", "_last", "_modes", "_thrown", "in_evaluation_mode", "in_training_mode"),
        *("has_forwards", "repeated", "thrown_away"),
    )

    def __init__(self) -> None:
        self.in_training_mode = self.in_evaluation_mode = self.repeated = 0
        self._forwards = 0
        self._modes: set[bool] = set()
        self._last = 0  # the step of the last forward without gradients
        self._is_apart = False
        self.thrown_away = 0
        self.has_forwards = False
        self._thrown = (-1, 0)

    def gradients_cleared(self, step: int, version: int) -> None:
        """Handle gradients that were cleared before an optimizer has used them.

        A search for a disturbance, as that of a sharpness-aware step, clears gradients once a step, and moves the weights.

        Parameters
        ----------
        step : int
            The number of the step that would have used them.
        version : int
            Changes with each change of the weights in place.

        Examples
        --------
        >>> events = LoopEvents()
        >>> for step, version in ((3, 7), (3, 7), (3, 7), (4, 8), (5, 9), (5, 10)):
        ...     events.gradients_cleared(step, version)
        >>> events.thrown_away
        2
        """
        self.thrown_away += self._thrown == (step, version)
        self._thrown = step, version

    def forward(self, step: int, training: bool, is_of_training: bool) -> None:
        """Handle the beginning of an outermost forward.

        Parameters
        ----------
        step : int
            The number of the open step, or of the next one.
        training : bool
            Whether the model is in training mode.
        is_of_training : bool
            Whether gradients are enabled, or the forward only estimates the statistics of batch norms.
        """
        self.has_forwards = True
        if is_of_training:
            if self._forwards:
                self._end()
            return
        if self._forwards and step > self._last:
            self._end()
        if not self._forwards:
            self._is_apart = step >= self._last + _APART
        self._forwards += 1
        self._modes.add(training)
        self._last = step

    @property
    def is_apart(self) -> bool:
        """Whether the last forward was of an evaluation, and the one before it is at least 10 steps ago."""
        return self._is_apart and self.is_evaluating

    @property
    def is_evaluating(self) -> bool:
        """Whether the last forward was of an evaluation: without gradients, and in evaluation mode or in a pass that is apart."""
        return self._forwards > 0 and (False in self._modes or self._is_apart)

    def _end(self) -> None:
        """End the pass."""
        if False in self._modes:
            self.in_evaluation_mode += 1
            self.repeated += self._forwards >= _FEWEST
        elif self._forwards >= _FEWEST and self._is_apart:
            self.in_training_mode += 1
        self._forwards = 0
        self._modes.clear()
