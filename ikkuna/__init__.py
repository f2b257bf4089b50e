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
_MODULES = ("integrations", "monitor", "netdict", "plot", "probe", "reading", "running", "schedules", "testing")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"ikkuna.{name}")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted({*dunders, *__all__, *_MODULES})
