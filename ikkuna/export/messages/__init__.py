"""Messages, their kinds, and the bus that delivers them."""

from ikkuna.export.message.bundle import MessageBundle
from ikkuna.export.message.kinds import (
    BUILT_IN,
    EVENT_KINDS,
    FORWARD_KINDS,
    MEASURED_TOGETHER,
    MICRO_KINDS,
    MODULE_KINDS,
    NETWORK_KINDS,
    PARAMETER_KINDS,
    STATE_PREFIXES,
)
from ikkuna.export.message.message import Message, ModuleMessage, NetworkMessage
from ikkuna.export.message.stamp import Stamp
from ikkuna.export.messages.bus import MessageBus, get_default_bus

__all__ = [
    "BUILT_IN",
    "EVENT_KINDS",
    "FORWARD_KINDS",
    "MEASURED_TOGETHER",
    "MICRO_KINDS",
    "MODULE_KINDS",
    "NETWORK_KINDS",
    "PARAMETER_KINDS",
    "STATE_PREFIXES",
    "Message",
    "MessageBundle",
    "MessageBus",
    "ModuleMessage",
    "NetworkMessage",
    "Stamp",
    "get_default_bus",
]
