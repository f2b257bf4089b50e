"""Messages of several kinds that belong together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikkuna.export.messages.message import Message, Stamp

__all__ = ["MessageBundle"]


@dataclass(slots=True)
class MessageBundle:
    """One message of each kind a subscription waits for, of the same stamp, module and path.

    Parameters
    ----------
    messages : kind → message, in the order of the subscription's kinds
    data : in ``compute``, the merged row of what was measured together

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
        """The message of the first kind; results computed from the bundle carry its name."""
        return next(iter(self.messages.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which kinds are in it."""
        return tuple(self.messages)

    @property
    def stamp(self) -> Stamp:
        """When."""
        return self.first.stamp

    @property
    def series_name(self) -> str | None:
        """The name of its curve."""
        return self.first.series_name

    def __getitem__(self, kind: str) -> Message:
        return self.messages[kind]

    def result(self, kind: str, value: float) -> Message:
        """Return the message that carries `value`, computed from this bundle."""
        return self.first.result(kind, value)
