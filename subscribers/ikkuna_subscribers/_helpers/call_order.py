"""Learns the order in which the tensors of a step arrive."""

from collections import Counter
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from ikkuna.export.messages import Message
from ikkuna.export.messages.batch import BatchNames

__all__ = ["CallOrder", "first_places", "site_of"]

_MOST_CHANGES = 3
_Site = tuple[str, str | None]


class CallOrder:
    """The order of the tensors of a step: kind and name of each in the last step of which all calls were seen.

    It is known while each tensor occurs once in a step and none is new; then the calls of further steps need not be seen.
    If new tensors have appeared three times, or if one occurs several times in a step, it is never known.

    Attributes
    ----------
    events : sequence of Message
        The messages of that step in the order of their calls, without data.

    Examples
    --------
    >>> from ikkuna.export.messages import ModuleMessage, Stamp
    >>> message, order = ModuleMessage(Stamp(0, 0, 1), "activations", module="fc"), CallOrder()
    >>> order.is_known, order.is_single(message), order.learn([message]), order.is_known, order.is_single(message)
    (False, False, None, True, True)
    """

    def __init__(self) -> None:
        self.events: Sequence[Message] = ()
        self._sites: set[_Site] = set()
        self._repeated: set[_Site] = set()
        self._is_complete = False
        self._changes = 0
        self._known_names: WeakSet[BatchNames] = WeakSet()

    @property
    def is_known(self) -> bool:
        """Whether the order of the next step is expected to be that of `events`."""
        return self._is_complete and not self._repeated and self._changes < _MOST_CHANGES

    def is_single(self, message: Message) -> bool:
        """Return whether the tensor of a message occurred once in each step that was learned, and in one step at least."""
        site = site_of(message)
        return site in self._sites and site not in self._repeated

    def learn(self, events: Sequence[Message]) -> None:
        """Learn the order of the messages of a step."""
        found = Counter(map(site_of, events))
        self._repeated.update(site for site, times in found.items() if times > 1)
        self._sites.update(found)
        self.events, self._is_complete = events, True

    def check(self, kind: str, names: BatchNames) -> None:
        """Compare the tensors of a step with the known ones; if one of them is new, the order is unknown until a step is learned."""
        if names in self._known_names:
            return
        if all((kind, name) in self._sites for name in names.names):
            self._known_names.add(names)
        elif self._is_complete:
            self._is_complete = False
            self._changes += 1


def site_of(message: Message) -> _Site:
    """Return kind and name of the tensor of a message."""
    return message.kind, message.series_name


def first_places(events: Iterable[Message]) -> dict[_Site, int]:
    """Return for each tensor the position of its first message."""
    places: dict[_Site, int] = {}
    for place, message in enumerate(events):
        places.setdefault(site_of(message), place)
    return places
