"""A window into a PyTorch training run."""

from typing import Any

__all__ = ["observe", "preflight", "replay", "schedules", "watch"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "watch":  # these are imported when asked for, since they import torch
        from ikkuna.export.watch import watch

        return watch
    if name == "preflight":
        from ikkuna.diagnosis.preflight import preflight

        return preflight
    if name == "replay":
        from ikkuna.export.replay.replay import replay

        return replay
    if name == "observe":
        from ikkuna.export.hooks.observed import observe

        return observe
    if name == "schedules":
        from importlib import import_module

        return import_module("ikkuna.schedules")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
