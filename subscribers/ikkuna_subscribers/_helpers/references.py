"""What later looks at a layer are compared with."""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from ikkuna.errors import ConfigError

__all__ = ["References"]

T = TypeVar("T")
_NAMES = ("previous", "init")


class References(Generic[T]):
    """Keeps what was found of each layer at the last look, at the first one, or at both.

    Parameters
    ----------
    owner : the class to name in errors
    names : any of ``"previous"`` and ``"init"``

    Raises
    ------
    ConfigError
        For another name.

    Examples
    --------
    >>> references = References("Some", ["previous", "init"])
    >>> references.keep({"fc": 1}); references.keep({"fc": 2})
    >>> references.of("fc"), references.of("out")
    ([2, 1], [None, None])
    """

    def __init__(self, owner: str, names: Iterable[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
        if not set(self.names) <= set(_NAMES):
            raise ConfigError(f"{owner} compares to {' and '.join(map(repr, _NAMES))}, got {list(self.names)}")
        self._kept: dict[str, dict[str, T]] = {name: {} for name in self.names}

    def of(self, layer: str) -> list[T | None]:
        """Return what is kept of a layer, in the order of the names; ``None`` before there is something."""
        return [self._kept[name].get(layer) for name in self.names]

    def keep(self, found: Mapping[str, T]) -> None:
        """Take what was found of all layers."""
        for name, kept in self._kept.items():
            for layer, value in found.items():
                if name == "previous":
                    kept[layer] = value
                else:
                    kept.setdefault(layer, value)
