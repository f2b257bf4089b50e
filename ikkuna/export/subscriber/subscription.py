"""What a subscriber wants to see: which kinds, of which modules, in which pass, how often."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.message.bundle import MessageBundle
from ikkuna.export.message.kinds import EVENT_KINDS, MEASURED_TOGETHER
from ikkuna.export.message.message import Message, ModuleMessage
from ikkuna.export.message.stamp import Stamp
from ikkuna.failures import FailureCounter

if TYPE_CHECKING:
    from ikkuna.export.subscriber.base import Subscriber

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
        f"modules needs a glob, a compiled regex, a function of a name or a list of these, got {modules!r}"
    )


def _checked_kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not names:
        raise ConfigError("a subscriber needs at least one kind, got an empty list")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigTypeError(f"kinds are strings, got {type(wrong[0]).__name__} {wrong[0]!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"kinds must differ from each other, got {list(names)}")
    return names


class Subscription:
    """A subscriber's wish, apart from what it does with what it gets.

    Parameters
    ----------
    subscriber : whose wish it is
    kinds : the kinds it wants, one or several
    tag : the pass it listens to; ``None`` for every pass
    subsample : take every so-many-th optimizer step, the first included.
        Passes other than training are always taken, and epochs are counted in epochs.
    modules : which modules, as a glob such as ``"features.*"``, a compiled regex, a function of the name, or a list of these

    Raises
    ------
    ConfigError
        For arguments that cannot be meant.
    """

    def __init__(
        self,
        subscriber: "Subscriber",
        kinds: str | Iterable[str],
        tag: str | None = "training",
        subsample: int = 1,
        modules: ModulePattern = None,
    ) -> None:
        if not isinstance(subsample, int) or isinstance(subsample, bool) or subsample < 1:
            raise ConfigError(f"subsample must be an int >= 1, got {subsample!r}")
        if tag is not None and not isinstance(tag, str):
            raise ConfigTypeError(f"tag must be the name of a pass or None, got {tag!r}")
        self.subscriber = subscriber
        self.kinds = _checked_kinds(kinds)
        self.tag = tag
        self.subsample = subsample
        self.modules = modules
        self.matches = _matcher(modules)
        self.failures = FailureCounter()  # by stage
        self.disabled = False
        self.seconds = 0.0  # spent in the subscriber's own code
        self.dropped = 0

    def samples(self, stamp: Stamp) -> bool:
        """Whether data of this step is wanted: a pure function of the stamp."""
        if self.disabled or (self.tag is not None and self.tag != stamp.pass_name):
            return False
        return stamp.pass_name != "training" or stamp.global_step % self.subsample == 0

    def takes(self, message: Message) -> bool:
        """Whether this very message is wanted."""
        if message.kind not in self.kinds or self.disabled:
            return False
        if message.kind in EVENT_KINDS and message.kind.startswith("epoch"):
            return message.epoch % self.subsample == 0
        if not self.samples(message.stamp):
            return False
        return not isinstance(message, ModuleMessage) or self.matches(message.module)

    @property
    def together(self) -> bool:
        """Whether tensors of several kinds are measured in one call."""
        return False

    def deliver(self, message: Message | MessageBundle) -> None:
        """Hand a message of floats to the subscriber."""
        self.subscriber.compute(message)

    def finish(self, stamp: Stamp) -> None:
        """Forget what waited for company at `stamp`."""


class SynchronizedSubscription(Subscription):
    """A wish for several kinds at once: they arrive as one `MessageBundle` per stamp, module and path.

    What has not met its company by the end of the step is dropped and counted in ``dropped``.
    It takes what `Subscription` takes.

    Raises
    ------
    ConfigError
        If there is only one kind.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if len(self.kinds) < 2:
            raise ConfigError(f"messages of one kind cannot be joined, got {list(self.kinds)}")
        self._waiting: dict[tuple[object, ...], dict[str, Message]] = {}

    @property
    def together(self) -> bool:
        """Whether all kinds are seen in the loss module's one call."""
        return self.subscriber.measures and set(self.kinds) <= set(MEASURED_TOGETHER)

    def deliver(self, message: Message | MessageBundle) -> None:
        """Keep a message until its company has come, then hand over the bundle."""
        if isinstance(message, MessageBundle):
            self.subscriber.compute(message)
            return
        waiting = self._waiting.setdefault(message.identity, {})
        waiting[message.kind] = message
        if len(waiting) == len(self.kinds):
            del self._waiting[message.identity]
            self.subscriber.compute(MessageBundle({kind: waiting[kind] for kind in self.kinds}))

    def finish(self, stamp: Stamp) -> None:
        """Drop and count the incomplete bundles of `stamp`."""
        stale = [identity for identity in self._waiting if identity[0] == stamp]
        for identity in stale:
            del self._waiting[identity]
        self.dropped += len(stale)
