"""The old place of the messages, until every import has been changed."""

from ikkuna.export.message.message import Message, ModuleMessage, NetworkMessage
from ikkuna.export.message.stamp import Stamp

__all__ = ["Message", "ModuleMessage", "NetworkMessage", "Stamp"]
