from ikkuna.export.bus.bus import MessageBus, get_default_bus
from ikkuna.export.messages.batch import BatchBundle, MessageBatch
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.export.messages.stamp import Stamp

__all__ = [
    "BatchBundle",
    "Message",
    "MessageBatch",
    "MessageBundle",
    "MessageBus",
    "ModuleMessage",
    "NetworkMessage",
    "Stamp",
    "get_default_bus",
]
