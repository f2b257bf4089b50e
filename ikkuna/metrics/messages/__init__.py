"""Messages, and the bus that delivers them.

`MessageBus` and `get_default_bus` are imported from `ikkuna.metrics.bus` on first use: that package imports this one.
"""

from importlib import import_module
from typing import Any

from ikkuna.metrics.messages.batch import MeasuredStep, MessageBatch
from ikkuna.metrics.messages.message import Message, MessageBundle, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp

__all__ = [
    "MeasuredStep",
    "Message",
    "MessageBatch",
    "MessageBundle",
    "MessageBus",
    "ModuleMessage",
    "NetworkMessage",
    "Stamp",
    "get_default_bus",
]


def __getattr__(name: str) -> Any:
    if name in ("MessageBus", "get_default_bus"):
        return getattr(import_module("ikkuna.metrics.bus.bus"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
