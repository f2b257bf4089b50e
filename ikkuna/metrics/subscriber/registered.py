"""A subscriber that is registered on a bus, and its running state."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ikkuna.backends.backend import key_of, last_defined
from ikkuna.metrics.messages.batch import BatchNames, MessageBatch
from ikkuna.metrics.messages.kinds import FORWARD_KINDS, MEASURED_TOGETHER, OBSERVED, PARAMETER_KINDS
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.base import METHODS, Subscriber
from ikkuna.metrics.subscriber.subscription import Sampling
from ikkuna.numerics.statistics import needed_fields
from ikkuna.support.failures import FailureCounter, log

_OF_FORWARDS = frozenset((*FORWARD_KINDS, OBSERVED, "input_data", "network_output", "input_labels"))


_NAMES: Callable[[MessageBatch], BatchNames] = attrgetter("names")
_FEW = 16
_KEPT = 64  # steps whose measurements may still be on their way


class Registered:
    """A subscriber that is registered on a bus, and its running state.

    Parameters
    ----------
    subscriber : Subscriber
        The registered subscriber.
    call : callable, optional
        ``call(registered, stage, function, argument)`` calls the user's code and handles its errors, see `ErrorGuard.call`.
    sampling : Sampling, optional
        What the user has switched while training runs.

    Attributes
    ----------
    subscription : Subscription
        The messages that the subscriber asks for.
    together : bool
        Whether the subscriber measures the tensors of its kinds in one call, as a `MessageBundle`.
    fields : frozenset of str
        The shared statistics that the subscriber reads.
    measures : bool
        Whether the subscriber measures tensors itself, perhaps not at each step.
    reads_tensors : bool
        Whether the subscriber takes measurements of tensors, rather than events and results alone.
    takes_batches : bool
        Whether ``compute_batch`` is called, rather than ``compute`` with each message: no class defines the second later.
    takes_steps : bool
        Whether ``compute_step`` is called with the measurements of a step, rather than ``compute_batch``.
    varies : bool
        Whether the subscriber decides for each step whether it measures.
    finishes : bool
        Whether the subscriber handles the end of steps.
    measured : tuple
        The rows that were measured in the last step, and those of them that the subscriber takes.
    targets : tuple
        Equal for subscribers with the same backends.
    regular_from : float
        The training step from which only divisors of a step decide whether it is sampled, before and after `thinning` begins,
        unless the user has changed that; infinite if it depends on more.
    disabled : bool
        Whether the subscriber is no longer called.
    failures : FailureCounter
        Consecutive failures by stage: ``"measure"``, ``"compute"`` and so on.
    seconds : float
        Time spent in the subscriber's own code.
    dropped : int
        Number of values that were dropped: incomplete bundles, and results that a device computes more slowly than they are sampled.
    """

    def __init__(
        self, subscriber: Subscriber, call: Callable[..., Any] | None = None, sampling: Sampling | None = None
    ) -> None:
        self.subscriber = subscriber
        self._call = call
        self._sampling = sampling or Sampling()
        self._scheduled: dict[int, bool] = {}
        self.subscription = subscriber.subscription
        self.kinds = self.subscription.kinds
        self.matches = self.subscription.matches
        self.together = (
            self.subscription.is_joined and subscriber.measures and set(self.kinds) <= set(MEASURED_TOGETHER)
        )
        self.needs_no_forward = not self.together and _OF_FORWARDS.isdisjoint(self.kinds)
        self.fields = needed_fields(subscriber.fields) if subscriber.fields else frozenset[str]()
        declared: Any = type(subscriber).measures
        self.varies = isinstance(declared, property) and declared is not Subscriber.measures
        self.measures = self.varies or subscriber.measures
        self.reads_tensors = self.measures or bool(self.fields)
        is_replaced = "compute" in vars(subscriber)
        self.takes_batches = not is_replaced and last_defined(type(subscriber), "compute_batch", "compute") != "compute"
        last = last_defined(type(subscriber), *METHODS)
        self.takes_steps = last == "compute_step" and not (is_replaced or self.subscription.is_joined)
        self.finishes = type(subscriber).finish is not Subscriber.finish or "finish" in vars(subscriber)
        asked = self.subscription
        is_regular = asked.schedule is None and asked.stop is None
        self.regular_from = max(asked.first, asked.start) if is_regular else math.inf
        self.takes_losses = type(subscriber).compute_losses is not Subscriber.compute_losses and asked.subsample == 1
        self.measured: tuple[object, tuple[Any, ...]] = None, ()
        self.targets = tuple(map(key_of, subscriber.backends))
        self.disabled = False
        self.failures = FailureCounter()
        self.seconds = 0.0
        self.dropped = 0
        self._is_late = False
        self._chosen: WeakKeyDictionary[BatchNames, tuple[NDArray[np.intp], BatchNames] | None] = WeakKeyDictionary()
        self.waiting: dict[Stamp, dict[str, list[MessageBatch]]] = {}
        self._common: dict[tuple[BatchNames, ...], _Common] = {}

    @property
    def label(self) -> str:
        """Name and kinds, such as ``NormSubscriber(weights)``; never the subscriber's own ``repr``, which can raise."""
        return f"{self.name}({', '.join(self.kinds)})"

    @property
    def name(self) -> str:
        """The name of the class; for the function of a user, the names of what it publishes."""
        subscriber = self.subscriber
        return " ".join(subscriber.publishes) if subscriber.is_of_function else type(subscriber).__name__

    def drop_late(self) -> None:
        """Count the results of a row that is not computed, because earlier ones still are; the first time, log it."""
        if not self._is_late:
            self._is_late = True
            log.warning(
                "%s: the device computes its values more slowly than they are sampled; the newest are dropped and counted. "
                "A larger every= avoids this",
                self.label,
            )
        self.dropped += max(1, len(self.subscriber.publishes))

    # -- which steps and modules ----------------------------------------------------------------------------------

    @property
    def distance(self) -> int:
        """A number of which every sampled training step is a multiple, from step ``first`` on."""
        return 1 if self._sampling.is_changed else self.subscription.subsample

    def steps_until_more(self, step: int) -> int:
        """Return the least number of training steps from `step` on before one of which more than the loss may be needed."""
        if self._sampling.is_changed:
            return 0
        needed = self.subscriber.needs_steps if self.takes_losses else None
        return (needed or self.subscription).steps_until_candidate(step)

    def samples(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled."""
        if self.disabled:
            return False
        is_due = self._is_due(stamp)
        if is_due or not stamp.completes:
            return is_due
        is_paused, _ = self._sampling.at(stamp.global_step)
        return not is_paused and self.subscription.includes(stamp) and any(map(self._is_due, stamp.completes))

    def _is_due(self, stamp: Stamp) -> bool:
        is_extra = stamp.global_step in self._sampling.extra and stamp.pass_name == TRAINING
        if is_extra and self.needs_no_forward and self.subscription.tag in (None, TRAINING):
            return self.subscription.includes(stamp)
        if self._sampling.is_changed and stamp.pass_name == TRAINING:
            is_paused, every = self._sampling.at(stamp.global_step)
            if is_paused or every is not None:
                is_of_pass = self.subscription.tag in (None, TRAINING)
                return is_of_pass and not is_paused and stamp.global_step % (every or 1) == 0
        if not self.subscription.is_candidate(stamp):
            return False
        return (
            self.subscription.schedule is None or stamp.pass_name != TRAINING or self._is_scheduled(stamp.global_step)
        )

    def _is_scheduled(self, step: int) -> bool:
        """Return whether the user's schedule samples a step; it is called once for each step."""
        known = self._scheduled.get(step)
        if known is None:
            schedule = self.subscription.schedule
            assert schedule is not None
            if self._call is None:
                return bool(schedule(step))
            known = bool(self._call(self, "schedule", lambda step: bool(schedule(step)), step))
            if len(self._scheduled) >= _KEPT:
                del self._scheduled[next(iter(self._scheduled))]
            self._scheduled[step] = known
        return known

    def select(self, batch: MessageBatch, is_sampled: bool | None = None) -> MessageBatch | None:
        """Return the messages of an event or of results that are delivered; ``None`` for none of them.

        `is_sampled` is whether the subscriber samples the step of the batch, if that is known.
        """
        if is_sampled is None:
            is_sampled = self.subscription.takes_step(batch.kind, batch.stamp, self.samples)
        if self.disabled or not is_sampled:
            return None
        if self.subscription.modules is None:
            return batch
        names = batch.names
        if names not in self._chosen:
            at = self._call(self, "modules", self._matching, names) if self._call else self._matching(names)
            positions = np.array(at or [], np.intp)
            self._chosen[names] = (positions, names.select(positions)) if at else None
        chosen = self._chosen[names]
        return None if chosen is None else batch.select(*chosen)

    def _matching(self, names: BatchNames) -> list[int]:
        return [i for i, module in enumerate(names.modules) if module is None or self.matches(module)]

    # -- joined kinds ---------------------------------------------------------------------------------------------

    def join(self, batches: Sequence[MessageBatch]) -> list[MessageBatch]:
        """Return the messages that batches complete, joined with those of the other kinds.

        The others wait for their partners until the end of the step.
        """
        complete = []
        for batch in batches:
            if batch.parts:
                complete.append(batch)
                continue
            waiting = self.waiting.setdefault(batch.stamp, {})
            waiting.setdefault(batch.kind, []).append(batch)
            if len(waiting) == len(self.kinds) and (joined := self._join(batch.stamp, waiting)) is not None:
                complete.append(joined)
        return complete

    def _join(self, stamp: Stamp, waiting: dict[str, list[MessageBatch]]) -> MessageBatch | None:
        """Return the messages that all kinds have, which wait no longer; ``None`` if there are none."""
        parts = {}
        for kind in self.kinds:
            each = waiting[kind]
            parts[kind] = each[0] if len(each) == 1 else MessageBatch.concatenated(each)
        names = tuple(map(_NAMES, parts.values()))
        if names not in self._common:
            if len(self._common) > _FEW:  # the modules that are called change from step to step
                self._common.clear()
            self._common[names] = _Common(names)
        common = self._common[names]
        if common.has_rest:
            self.waiting[stamp] = {
                kind: [part.select(*rest)]
                for (kind, part), rest in zip(parts.items(), common.rest, strict=True)
                if rest is not None
            }
        else:
            del self.waiting[stamp]
        if not common.names.names:
            return None
        for kind, at in zip(self.kinds, common.positions, strict=True):
            if at is not None:
                parts[kind] = parts[kind].select(at, common.names)
        return MessageBatch.joined(parts)

    def drop_incomplete(self, stamp: Stamp) -> None:
        """Drop and count the incomplete bundles of a step that is over, and those that exceptions have left of earlier ones.

        A parameter that is not trained has no gradient and no update; a bundle of parameters that lacks one is not counted.
        """
        is_lost = not set(self.kinds).issubset(PARAMETER_KINDS)
        same_pass = [known for known in self.waiting if known.pass_name == stamp.pass_name]
        for known in [known for known in same_pass if known.global_step <= stamp.global_step]:
            batches = [batch for of_kind in self.waiting.pop(known).values() for batch in of_kind]
            self.dropped += is_lost * len({key for batch in batches for key in batch.names.positions})


class _Common:
    """The modules and paths that the batches of a bundle have in common.

    Parameters
    ----------
    batches : tuple of BatchNames
        Those of each batch.

    Attributes
    ----------
    names : BatchNames
        What they have in common, under the names in the first batch.
    positions : list of array or None
        Where each batch has these; ``None`` if it has nothing else, in the same order.
    rest : list of (array, BatchNames) or None
        Positions and names of what others lack; ``None`` for nothing.
    has_rest : bool
        Whether there is any.
    """

    def __init__(self, batches: tuple[BatchNames, ...]) -> None:
        keys = [key for key in batches[0].positions if all(key in other.positions for other in batches)]
        common = frozenset(keys)
        self.positions: list[NDArray[np.intp] | None] = []
        self.rest: list[tuple[NDArray[np.intp], BatchNames] | None] = []
        for each in batches:
            at = [each.positions[key] for key in keys]
            left = np.array([i for key, i in each.positions.items() if key not in common], np.intp)
            self.positions.append(None if at == list(range(len(each))) else np.array(at, np.intp))
            self.rest.append((left, each.select(left)) if len(left) else None)
        self.has_rest = any(rest is not None for rest in self.rest)
        first = self.positions[0]
        self.names = batches[0] if first is None else batches[0].select(first)
