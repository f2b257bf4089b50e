"""A window into a PyTorch training run."""

from typing import Any

__all__ = ["watch"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "watch":  # imported when asked for, since it imports torch
        from ikkuna.export.watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
