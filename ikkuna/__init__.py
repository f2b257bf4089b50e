"""A window into a PyTorch training run."""

from typing import TYPE_CHECKING, Any

from ikkuna.version import __version__ as __version__

if TYPE_CHECKING:  # for editors; at run time these are imported when asked for, since they import torch
    from ikkuna import schedules as schedules
    from ikkuna.diagnosis.preflight import preflight as preflight
    from ikkuna.export.replay import replay as replay
    from ikkuna.export.watch import watch as watch
    from ikkuna.observation.hooks.observed import observe as observe

__all__ = ["observe", "preflight", "replay", "schedules", "watch"]

_PLACES = {
    "observe": "ikkuna.observation.hooks.observed",
    "preflight": "ikkuna.diagnosis.preflight",
    "replay": "ikkuna.export.replay",
    "watch": "ikkuna.export.watch",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "schedules":
        return import_module("ikkuna.schedules")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
