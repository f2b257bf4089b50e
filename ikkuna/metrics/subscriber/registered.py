"""A subscriber that is registered on a bus, and its running state."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.metrics.messages.batch import BatchBundle, BatchNames, MessageBatch, NotVectorizedError
from ikkuna.metrics.messages.bundle import MessageBundle
from ikkuna.metrics.messages.kinds import MEASURED_TOGETHER, PARAMETER_KINDS
from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.metrics.subscriber.sampling import Sampling
from ikkuna.numerics.statistics import closure
from ikkuna.support.failures import FailureCounter, log

__all__ = ["Registered"]


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
    takes_batches : bool
        Whether the subscriber takes the messages of all modules at once, at steps at which it does not measure.
    varies : bool
        Whether the subscriber decides for each step whether it measures.
    finishes : bool
        Whether the subscriber handles the end of steps.
    rhythm : tuple
        Equal for subscribers that sample the same steps.
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
        self.fields = closure(subscriber.fields) if subscriber.fields else frozenset[str]()
        self.takes_batches = subscriber.takes_batches
        self.varies = type(subscriber).measures is not Subscriber.measures
        self.finishes = type(subscriber).finish is not Subscriber.finish or "finish" in vars(subscriber)
        asked = self.subscription
        self.rhythm: tuple[Any, ...] = (
            (asked.tag, asked.subsample, asked.start, asked.stop, asked.thinning)
            if asked.schedule is None
            else (id(self),)
        )
        self.disabled = False
        self.failures = FailureCounter()
        self.seconds = 0.0
        self.dropped = 0
        self._is_late = False
        self._waiting: dict[tuple[object, ...], dict[str, Message]] = {}
        self._batches: dict[str, MessageBatch] = {}
        self._rest: list[
            tuple[_Common, dict[str, MessageBatch]]
        ] = []  # of bundles whose batches differ in their modules
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

    @property
    def distance(self) -> int:
        """A number of which every sampled training step is a multiple."""
        return 1 if self._sampling.is_changed else self.subscription.subsample

    def samples(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled."""
        if self.disabled:
            return False
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

    def takes(self, message: Message) -> bool:
        """Return whether this message is delivered."""
        return not self.disabled and self.subscription.takes(message, self.samples)

    def deliver(self, message: Message | MessageBundle) -> None:
        """Call ``compute`` with a message; messages of a joined subscription wait until their bundle is complete."""
        if isinstance(message, MessageBundle) or not self.subscription.is_joined:
            self.subscriber.compute(message)
            return
        self._divide_batches()
        self._wait(message)

    def refuses(self, batch: MessageBatch | BatchBundle) -> bool:
        """Call ``compute_batch``; return whether its messages must be delivered one by one, from then on."""
        try:
            self.subscriber.compute_batch(batch)
        except NotVectorizedError as error:
            log.debug("%s takes messages one by one from now on", self.label, exc_info=error)
            self.takes_batches = False
        return not self.takes_batches

    def _wait(self, message: Message) -> None:
        waiting = self._waiting.setdefault(message.identity, {})
        waiting[message.kind] = message
        if len(waiting) == len(self.kinds):
            del self._waiting[message.identity]
            self.subscriber.compute(MessageBundle({kind: waiting[kind] for kind in self.kinds}))

    def selection(self, batch: MessageBatch) -> MessageBatch | None:
        """Return the messages of a batch that are delivered; ``None`` for nothing."""
        if self.disabled or not self.subscription.samples(batch.stamp):
            return None
        if self.subscription.modules is None:
            return batch
        chosen = [i for i, name in enumerate(batch.names.modules) if name is None or self.matches(name)]
        positions = np.array(chosen, np.intp)
        return batch.select(positions, batch.names.select(positions)) if chosen else None

    def can_join(self, batch: MessageBatch) -> bool:
        """Return whether a batch can be joined with others; not if messages wait one by one."""
        is_other_step = any(other.stamp != batch.stamp for other in self._batches.values())
        return not (self._waiting or self._rest or batch.kind in self._batches or is_other_step)

    def join(self, batch: MessageBatch) -> BatchBundle | None:
        """Return the bundle that a batch completes; ``None`` if others have yet to arrive, or have no module in common."""
        self._batches[batch.kind] = batch
        if len(self._batches) < len(self.kinds):
            return None
        batches, self._batches = {kind: self._batches[kind] for kind in self.kinds}, {}
        common = self._common_names(tuple(batch.names for batch in batches.values()))
        if common.rest:
            self._rest.append((common, batches))
        return common.bundle(batches)

    def _common_names(self, names: tuple[BatchNames, ...]) -> "_Common":
        if names not in self._common:
            if len(self._common) > _FEW:  # the modules that are called change from step to step
                self._common.clear()
            self._common[names] = _Common(names)
        return self._common[names]

    def _divide_batches(self) -> None:
        """Let the messages of batches wait one by one, because others arrive so; these complete no bundle."""
        batches, self._batches = self._batches, {}
        rest, self._rest = self._rest, []
        for batch in batches.values():
            for message in batch.messages():
                self._wait(message)
        for common, parts in rest:
            for message in common.others(parts):
                self._wait(message)

    def drop_incomplete(self, stamp: Stamp) -> None:
        """Drop and count the incomplete bundles of a step that is over, and those that exceptions have left of earlier ones.

        A parameter that is not trained has no gradient and no update; a bundle of parameters that lacks one is not counted.
        """
        if not (self._waiting or self._batches or self._rest):
            return
        over = [(common, parts) for common, parts in self._rest if _is_over(next(iter(parts.values())).stamp, stamp)]
        self._rest = [item for item in self._rest if item not in over]
        is_lost = not set(self.subscriber.kinds).issubset(PARAMETER_KINDS)
        self.dropped += is_lost * sum(len(common.rest) for common, _ in over)
        self._divide_batches()
        incomplete = [identity for identity in self._waiting if _is_over(identity[0], stamp)]
        for identity in incomplete:
            del self._waiting[identity]
        self.dropped += is_lost * len(incomplete)


class _Common:
    """The modules and paths that the batches of a bundle have in common.

    Parameters
    ----------
    names : tuple of BatchNames
        Those of each batch.

    Attributes
    ----------
    rest : set
        The modules and paths that some of the batches lack.
    """

    def __init__(self, names: tuple[BatchNames, ...]) -> None:
        keys = [key for key in names[0].positions if all(key in other.positions for other in names)]
        self.rest = {key for part in names for key in part.positions} - set(keys)
        self._positions: list[NDArray[np.intp] | None] = []
        for part in names:
            positions = [part.positions[key] for key in keys]
            is_whole = positions == list(range(len(part)))
            self._positions.append(None if is_whole else np.array(positions, np.intp))
        first = self._positions[0]
        self._names = names[0] if first is None else names[0].select(first)

    def bundle(self, batches: Mapping[str, MessageBatch]) -> BatchBundle | None:
        """Return the bundle of the common messages; ``None`` if there are none."""
        if not len(self._names):
            return None
        chosen = zip(batches.items(), self._positions, strict=True)
        return BatchBundle(
            {kind: batch if at is None else batch.select(at, self._names) for (kind, batch), at in chosen}
        )

    def others(self, batches: Mapping[str, MessageBatch]) -> Iterator[Message]:
        """Yield the messages whose modules and paths are not common."""
        for batch in batches.values():
            for key, i in batch.names.positions.items():
                if key in self.rest:
                    yield batch.message(i)


def _is_over(stamp: Any, last: Stamp) -> bool:
    return bool(stamp.pass_name == last.pass_name and stamp.global_step <= last.global_step)
