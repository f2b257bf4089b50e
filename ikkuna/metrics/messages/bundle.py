"""Messages of several kinds that are delivered together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikkuna.metrics.messages.message import Message
from ikkuna.metrics.messages.stamp import Stamp

__all__ = ["MessageBundle"]


@dataclass(slots=True)
class MessageBundle:
    """One message of each kind of a subscription, all with the same stamp, module and path.

    Parameters
    ----------
    messages : mapping of str to Message
        The messages by kind, in the order of the subscription's kinds.
    data : array, optional
        In ``compute`` the merged row, if the subscriber measured the tensors of these kinds together.

    Examples
    --------
    >>> stamp = Stamp(0, 0, 0)
    >>> bundle = MessageBundle({"loss": Message(stamp, "loss", 0.5), "train_accuracy": Message(stamp, "train_accuracy", 0.9)})
    >>> bundle["loss"].data, bundle.kinds
    (0.5, ('loss', 'train_accuracy'))
    """

    messages: Mapping[str, Message]
    data: Any = None

    @property
    def first(self) -> Message:
        """The message of the first kind, whose name the results of the bundle carry."""
        return next(iter(self.messages.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the messages."""
        return tuple(self.messages)

    @property
    def stamp(self) -> Stamp:
        """The stamp that all messages share."""
        return self.first.stamp

    @property
    def series_name(self) -> str | None:
        """The name of the curve."""
        return self.first.series_name

    def __getitem__(self, kind: str) -> Message:
        return self.messages[kind]
