"""The live half: hooks, messages, subscribers."""

from ikkuna.export.exporter import Exporter, Health

__all__ = ["Exporter", "Health"]
