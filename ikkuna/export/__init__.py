"""The live half: hooks, messages, subscribers.

`Exporter` and `Health` are imported on first use: the flight recorder, which they import, imports packages of this one.
"""

from importlib import import_module
from typing import Any

__all__ = ["Exporter", "Health"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"ikkuna.export.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
