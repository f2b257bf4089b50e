"""The live half: hooks, messages, subscribers."""

from ikkuna.export.attachment import Health
from ikkuna.export.exporter import Exporter

__all__ = ["Exporter", "Health"]
