from ikkuna.export.exporter import Exporter
from ikkuna.export.health import Health

__all__ = ["Exporter", "Health"]
