"""The public import name of `ikkuna.metrics.subscriber`."""

from typing import TYPE_CHECKING, Any

from ikkuna.metrics import subscriber as _home

if TYPE_CHECKING:
    from ikkuna.metrics.subscriber import *  # noqa: F403  # what a type checker sees


def __getattr__(name: str) -> Any:
    return getattr(_home, name)


def __dir__() -> list[str]:
    return dir(_home)
