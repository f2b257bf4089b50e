"""A window into a PyTorch training run."""

from typing import Any

from ikkuna.version import __version__ as __version__

__all__ = ["observe", "preflight", "replay", "schedules", "watch"]


def __getattr__(name: str) -> Any:
    if name == "watch":  # these are imported when asked for, since they import torch
        from ikkuna.export.watch import watch

        return watch
    if name == "preflight":
        from ikkuna.diagnosis.preflight import preflight

        return preflight
    if name == "replay":
        from ikkuna.export.replay import replay

        return replay
    if name == "observe":
        from ikkuna.observation.hooks.observed import observe

        return observe
    if name == "schedules":
        from importlib import import_module

        return import_module("ikkuna.schedules")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
