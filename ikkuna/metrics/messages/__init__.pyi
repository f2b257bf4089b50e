from ikkuna.metrics.bus.bus import MessageBus, get_default_bus
from ikkuna.metrics.messages.batch import MeasuredStep, MessageBatch
from ikkuna.metrics.messages.message import Message, ModuleMessage, NetworkMessage
from ikkuna.metrics.messages.message import MessageBundle as MessageBundle
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
