"""The messages that a subscriber asks for: kinds, modules, pass, and how often."""

import copy
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages.message import Message, ModuleMessage
from ikkuna.export.messages.stamp import TRAINING, Stamp

__all__ = ["ModulePattern", "Subscription", "SynchronizedSubscription"]

ModulePattern = str | re.Pattern[str] | Callable[[str], bool] | Sequence["str | re.Pattern[str]"] | None


def _matcher(modules: ModulePattern) -> Callable[[str], bool]:
    if modules is None:
        return lambda name: True
    if isinstance(modules, str):
        return lambda name: fnmatch.fnmatchcase(name, modules)
    if isinstance(modules, re.Pattern):
        return lambda name: modules.fullmatch(name) is not None
    if isinstance(modules, Sequence) and modules:
        matchers = [_matcher(pattern) for pattern in modules]
        return lambda name: any(match(name) for match in matchers)
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
    matches: Callable[[str], bool]
    thinning: tuple[int, int]
    is_joined: ClassVar[bool] = False

    def __init__(
        self,
        kinds: str | Iterable[str],
        tag: str | None = TRAINING,
        subsample: int = 1,
        modules: ModulePattern = None,
    ) -> None:
        if not isinstance(subsample, int) or isinstance(subsample, bool) or subsample < 1:
            raise ConfigError(f"subsample must be an int >= 1, got {subsample!r}")
        if tag is not None and not isinstance(tag, str):
            raise ConfigTypeError(f"tag must be the name of a pass or None, got {tag!r}")
        names = _checked_kinds(kinds)
        if self.is_joined and len(names) < 2:
            raise ConfigError(f"join=True needs at least 2 kinds, got 1: {names[0]!r}")
        values = {"kinds": names, "tag": tag, "subsample": subsample, "modules": modules, "thinning": (0, 1)}
        for name, value in (values | {"matches": _matcher(modules)}).items():
            object.__setattr__(self, name, value)

    def samples(self, stamp: Stamp) -> bool:
        """Return whether data of this step is sampled: a pure function of the stamp, so that all ranks agree."""
        if self.tag is not None and self.tag != stamp.pass_name:
            return False
        if stamp.pass_name != TRAINING:
            return True
        begin, factor = self.thinning
        return stamp.global_step % (self.subsample if stamp.global_step < begin else self.subsample * factor) == 0

    def thinned(self, begin: int, factor: int) -> Self:
        """Return a subscription that takes only every `factor`-th sample from step `begin` on.

        Examples
        --------
        >>> thinned = Subscription("weights", subsample=10).thinned(100, 4)
        >>> [step for step in range(200) if thinned.samples(Stamp(step, step, 1))]
        [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 120, 160]
        """
        if begin < 0 or factor < 1:
            raise ConfigError(f"thinned needs begin >= 0 and factor >= 1, got {begin!r} and {factor!r}")
        thinned = copy.copy(self)
        object.__setattr__(thinned, "thinning", (begin, factor))
        return thinned

    def takes(self, message: Message) -> bool:
        """Return whether this message is delivered.  Events of epochs are delivered whatever the tag."""
        if message.kind not in self.kinds:
            return False
        if message.kind in ("epoch_started", "epoch_finished"):
            return message.epoch % self.subsample == 0
        if not self.samples(message.stamp):
            return False
        return not isinstance(message, ModuleMessage) or self.matches(message.module)


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
