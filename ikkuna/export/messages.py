"""The public import name of `ikkuna.metrics.messages`."""

from typing import TYPE_CHECKING, Any

from ikkuna.metrics import messages as _home

if TYPE_CHECKING:
    from ikkuna.metrics.messages import *  # noqa: F403  # what a type checker sees


def __getattr__(name: str) -> Any:
    return getattr(_home, name)


def __dir__() -> list[str]:
    return dir(_home)
