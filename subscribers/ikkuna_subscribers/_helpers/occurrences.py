"""Counts how often each tensor occurs in a step."""

from collections import Counter
from collections.abc import Iterable

from ikkuna.export.messages import Message

__all__ = ["Occurrences"]

_Site = tuple[str, str | None]


class Occurrences:
    """Counts how often each kind of each module occurs in a step.

    Examples
    --------
    >>> from ikkuna.export.messages import ModuleMessage, Stamp
    >>> message, occurrences = ModuleMessage(Stamp(0, 0, 1), "activations", module="fc"), Occurrences()
    >>> occurrences.is_single(message), occurrences.count([message]), occurrences.is_single(message)
    (False, None, True)
    """

    def __init__(self) -> None:
        self._single: set[_Site] = set()
        self._repeated: set[_Site] = set()

    def is_single(self, message: Message) -> bool:
        """Return whether the tensor of a message occurred once in each step that was counted, and in one step at least."""
        return (message.kind, message.series_name) in self._single

    def count(self, messages: Iterable[Message]) -> None:
        """Count the messages of a step."""
        found = Counter((message.kind, message.series_name) for message in messages)
        self._repeated.update(site for site, times in found.items() if times > 1)
        self._single.update(found)
        self._single -= self._repeated
