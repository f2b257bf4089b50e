"""A choice of subscribers for those who do not want to choose."""

from abc import ABC, abstractmethod

from ikkuna.export.subscriber.base import Subscriber

__all__ = ["GROUP", "Preset"]

GROUP = "ikkuna.presets"


class Preset(ABC):
    """Names subscribers that go well together; found through the entry-point group ``ikkuna.presets``."""

    @abstractmethod
    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return new subscribers; `sees_loss` if the loss module is known."""
