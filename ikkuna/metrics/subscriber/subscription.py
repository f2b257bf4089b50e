"""The messages that a subscriber asks for: kinds, modules, pass, and how often."""

import copy
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ikkuna.errors import ConfigError, ConfigTypeError, is_integer
from ikkuna.metrics.messages.message import Message, ModuleMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp

_KEPT = 32  # changes; measurements of earlier steps have been delivered


class Sampling:
    """The changes of sampling, each from a step on.  What applies to a step never changes after the step has begun.

    Attributes
    ----------
    is_changed : bool
        Whether there was any change.
    extra : set of int
        Steps that are sampled beside, by the subscribers that need no forward, because their loss is unusual.

    Examples
    --------
    >>> sampling = Sampling()
    >>> sampling.change(10, paused=True)
    >>> sampling.change(20, paused=False, every=1)
    >>> sampling.at(9), sampling.at(10), sampling.at(20)
    ((False, None), (True, None), (False, 1))
    """

    def __init__(self) -> None:
        self.is_changed = False
        self.extra: set[int] = set()
        self._changes: tuple[tuple[int, bool, int | None], ...] = ((0, False, None),)

    @property
    def is_paused(self) -> bool:
        """Whether the last change pauses sampling."""
        return self._changes[-1][1]

    def at(self, step: int) -> tuple[bool, int | None]:
        """Return whether sampling is paused at a step, and at which steps all subscribers sample; ``None`` for their own."""
        return next(
            ((paused, every) for first, paused, every in reversed(self._changes) if first <= step), (False, None)
        )

    def change(self, step: int, paused: bool | None = None, every: int | None = -1) -> None:
        """Change the sampling from `step` on.

        Parameters
        ----------
        step : int
            The first step to which the change applies.
        paused : bool, optional
            Whether nothing is sampled; by default as before.
        every : int or None
            All subscribers sample each multiple of this number; ``None`` for their own steps, -1 for as before.
        """
        _, was_paused, was_every = self._changes[-1]
        change = step, was_paused if paused is None else paused, was_every if every == -1 else every
        self._changes = (*(known for known in self._changes if known[0] < step), change)[-_KEPT:]
        self.is_changed = True


ModulePattern = str | re.Pattern[str] | Callable[[str], bool] | Sequence["str | re.Pattern[str]"] | None

Schedule = Callable[[int], bool]

_WILDCARDS = frozenset("*?[")


def _matcher(modules: ModulePattern) -> Callable[[str], bool]:
    if modules is None:
        return lambda name: True
    if isinstance(modules, str):
        return lambda name: fnmatch.fnmatchcase(name, modules)
    if isinstance(modules, re.Pattern):
        return lambda name: modules.fullmatch(name) is not None
    if isinstance(modules, Sequence) and modules:
        names = frozenset(name for name in modules if isinstance(name, str) and _WILDCARDS.isdisjoint(name))
        matchers = [_matcher(pattern) for pattern in modules if pattern not in names]
        return lambda name: name in names or any(match(name) for match in matchers)
    if callable(modules):
        return modules
    raise ConfigTypeError(
        f"modules needs a glob, a compiled regex, a function of a name, or a list of globs and regexes, got {modules!r}"
    )


def _checked_kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not names:
        raise ConfigError("kinds needs at least one kind, got an empty list")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigTypeError(f"kinds are strings, got {type(wrong[0]).__name__} {wrong[0]!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"kinds must differ from each other, got {list(names)}")
    return names


@dataclass(frozen=True, eq=False, init=False)
class Subscription:
    """The messages that a subscriber asks for.

    Parameters
    ----------
    kinds : str or iterable of str
        One or several kinds.
    tag : str or None
        The name of a pass; ``None`` for every pass.
    subsample : int
        Sample every `subsample`-th optimizer step, including step 0.
        Steps of other passes are always sampled; events of epochs are counted in epochs.
    modules : str, Pattern, callable, sequence of them, or None
        A glob such as ``"features.*"``, a compiled regex, a function of the name, or a list of globs and regexes.
    start, stop : int
        Sample only steps from `start` on and before `stop`; events of epochs only of these epochs.
    first : int
        All steps before this one are sampled too.
    schedule : callable, optional
        A pure function of the step, such as ``ikkuna.schedules.logarithmic()``, that returns whether it is sampled;
        the step must also satisfy the other conditions.  It is called in each process, and must return the same in all of them.

    Attributes
    ----------
    matches : callable
        ``matches(name)`` returns whether the module of this name is among `modules`.
    thinning : tuple of int
        The step from which fewer steps are sampled, and the factor, see :meth:`thinned`.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    Examples
    --------
    >>> subscription = Subscription("weights", subsample=10, modules="features.*")
    >>> subscription.matches("features.0"), subscription.samples(Stamp(10, 0, 1)), subscription.samples(Stamp(11, 1, 1))
    (True, True, False)
    """

    kinds: tuple[str, ...]
    tag: str | None
    subsample: int
    modules: ModulePattern
    start: int
    stop: int | None
    first: int
    schedule: Schedule | None
    matches: Callable[[str], bool]
    thinning: tuple[tuple[int, int], ...]
    is_joined: ClassVar[bool] = False

    def __init__(
        self,
        kinds: str | Iterable[str],
        tag: str | None = TRAINING,
        subsample: int = 1,
        modules: ModulePattern = None,
        start: int = 0,
        stop: int | None = None,
        schedule: Schedule | None = None,
        first: int = 0,
    ) -> None:
        if not is_integer(subsample, 1):
            raise ConfigError(f"subsample must be an int >= 1, got {subsample!r}")
        if tag is not None and not isinstance(tag, str):
            raise ConfigTypeError(f"tag must be the name of a pass or None, got {tag!r}")
        _check_range(start, stop)
        if schedule is not None and not callable(schedule):
            raise ConfigTypeError(f"schedule needs a function of the step, got {type(schedule).__name__}")
        names = _checked_kinds(kinds)
        if self.is_joined and len(names) < 2:
            raise ConfigError(f"join=True needs at least 2 kinds, got 1: {names[0]!r}")
        values: dict[str, Any] = {"kinds": names, "tag": tag, "subsample": subsample, "modules": modules}
        values |= {"start": start, "stop": stop, "first": first, "schedule": schedule, "thinning": ()}
        for name, value in (values | {"matches": _matcher(modules)}).items():
            object.__setattr__(self, name, value)

    def samples(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled: a pure function of the stamp, so that all ranks agree."""
        is_due = self._is_due(stamp)
        if is_due or not stamp.completes:
            return is_due
        return self.includes(stamp) and any(map(self._is_due, stamp.completes))

    def _is_due(self, stamp: Stamp) -> bool:
        if not self.is_candidate(stamp):
            return False
        return self.schedule is None or stamp.pass_name != TRAINING or bool(self.schedule(stamp.global_step))

    def includes(self, stamp: Stamp) -> bool:
        """Return whether a step lies between `start` and `stop`."""
        return stamp.global_step >= self.start and (self.stop is None or stamp.global_step < self.stop)

    def is_candidate(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled if the schedule agrees."""
        if self.tag is not None and self.tag != stamp.pass_name:
            return False
        step = stamp.global_step
        if step < self.start or (self.stop is not None and step >= self.stop):
            return False
        if stamp.pass_name != TRAINING:
            return True
        return step < self.first or self.steps_until_candidate(step) == 0

    def steps_until_candidate(self, step: int) -> int:
        """Return the least number of training steps from `step` on before one that may be sampled, from step `first` on."""
        distance = self.subsample
        for begin, factor in self.thinning:
            if step >= begin:
                distance = self.subsample * factor
        return -step % distance

    def thinned(self, *stages: tuple[int, int]) -> Self:
        """Return a subscription that takes only every n-th sample from a step on, for each ``(step, n)`` in their order.

        Examples
        --------
        >>> thinned = Subscription("weights", subsample=10).thinned((50, 4), (150, 8))
        >>> [step for step in range(400) if thinned.samples(Stamp(step, step, 1))]
        [0, 10, 20, 30, 40, 80, 120, 160, 240, 320]
        """
        begins = [begin for begin, _ in stages]
        if begins != sorted(begins) or any(begin < 0 or factor < 1 for begin, factor in stages):
            raise ConfigError(f"thinned needs rising steps >= 0 with factors >= 1, got {stages!r}")
        thinned = copy.copy(self)
        object.__setattr__(thinned, "thinning", stages)
        return thinned

    def takes(self, message: Message) -> bool:
        """Return whether this message is delivered.  Events of epochs are delivered whatever the tag."""
        if message.kind not in self.kinds or not self.takes_step(message.kind, message.stamp, self.samples):
            return False
        return not isinstance(message, ModuleMessage) or self.matches(message.module)

    def takes_step(self, kind: str, stamp: Stamp, samples: Callable[[Stamp], bool]) -> bool:
        """Return whether messages of a kind are delivered at a step that `samples` or does not; epochs are counted apart."""
        if kind in ("epoch_started", "epoch_finished"):
            is_in_range = stamp.epoch >= self.start and (self.stop is None or stamp.epoch < self.stop)
            return stamp.epoch % self.subsample == 0 and is_in_range
        return samples(stamp)

    def sampled(self, **changes: Any) -> Self:
        """Return the same subscription with another `subsample`, `start`, `stop`, `first` or `schedule`."""
        known = {name: getattr(self, name) for name in ("subsample", "start", "stop", "first", "schedule")}
        return type(self)(self.kinds, self.tag, modules=self.modules, **(known | changes))


def _check_range(start: object, stop: object) -> None:
    for name, value in (("start", start), ("stop", stop)):
        if not is_integer(value, 0) and (name == "start" or value is not None):
            raise ConfigError(f"{name} must be the number of a step, got {value!r}")
    if isinstance(start, int) and isinstance(stop, int) and stop <= start:
        raise ConfigError(f"stop must be greater than start, got start={start} and stop={stop}: no step is sampled")


class SynchronizedSubscription(Subscription):
    """A subscription of several kinds whose messages are delivered as one `MessageBundle` per stamp, module and path.

    Messages whose partners have not arrived by the end of the step are dropped and counted in ``health().dropped``.
    The parameters are those of `Subscription`.

    Raises
    ------
    ConfigError
        If there is only one kind.
    """

    is_joined = True
