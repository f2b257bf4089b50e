"""The base class of presets, which are named sets of subscribers."""

from abc import ABC, abstractmethod

from ikkuna.export.subscriber.base import Subscriber

__all__ = ["GROUP", "Preset"]

GROUP = "ikkuna.presets"


class Preset(ABC):
    """A set of subscribers that is found by name through the entry-point group ``ikkuna.presets``."""

    @abstractmethod
    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return new subscribers; `sees_loss` is whether the outputs and labels are known from which the loss is computed."""
