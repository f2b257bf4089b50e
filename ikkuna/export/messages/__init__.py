"""Messages, their kinds, and the bus that carries them."""

from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.bus import MessageBus, get_default_bus
from ikkuna.export.messages.message import Message, ModuleMessage, NetworkMessage, Stamp

__all__ = ["Message", "MessageBundle", "MessageBus", "ModuleMessage", "NetworkMessage", "Stamp", "get_default_bus"]
