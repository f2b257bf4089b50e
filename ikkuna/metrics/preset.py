"""The base class of presets, which are named sets of subscribers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ikkuna.metrics.subscriber.base import Subscriber
from ikkuna.store.values import ModuleEntry

__all__ = ["GROUP", "Preset"]


GROUP = "ikkuna.presets"


class Preset(ABC):
    """A set of subscribers that is found by name through the entry-point group ``ikkuna.presets``.

    Attributes
    ----------
    network : tuple of ModuleEntry
        Names, classes and parameter shapes of the observed modules, which `ikkuna.watch` sets before it asks for the subscribers;
        empty before.
    rules : mapping
        Options of `Exporter.apply_rules`, such as ``{"every": 100}``.
    """

    network: tuple[ModuleEntry, ...] = ()
    rules: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return new subscribers; `sees_loss` is whether the outputs and labels are known from which the loss is computed."""
