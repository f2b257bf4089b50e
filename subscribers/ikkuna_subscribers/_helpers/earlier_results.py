"""Results of earlier evaluations of a layer, for metrics that compare with them."""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from ikkuna.errors import ConfigError

__all__ = ["EarlierResults"]

T = TypeVar("T")
_NAMES = ("previous", "init")


class EarlierResults(Generic[T]):
    """Stores the result of the previous evaluation of each layer, of the first evaluation, or both.

    Parameters
    ----------
    owner : str
        The class that error texts name.
    names : iterable of {'previous', 'init'}
        The evaluations to store.

    Raises
    ------
    ConfigError
        If `names` has another element.

    Examples
    --------
    >>> earlier = EarlierResults("Some", ["previous", "init"])
    >>> earlier.store({"fc": 1}); earlier.store({"fc": 2})
    >>> earlier.find("fc"), earlier.find("out")
    ([2, 1], [None, None])
    """

    def __init__(self, owner: str, names: Iterable[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
        if not set(self.names) <= set(_NAMES):
            raise ConfigError(f"{owner} compares to {' and '.join(map(repr, _NAMES))}, got {list(self.names)}")
        self._stored: dict[str, dict[str, T]] = {name: {} for name in self.names}

    def find(self, layer: str) -> list[T | None]:
        """Return the stored results of a layer in the order of `names`; ``None`` for an evaluation that did not happen yet."""
        return [self._stored[name].get(layer) for name in self.names]

    def store(self, results: Mapping[str, T]) -> None:
        """Store the results of an evaluation, by layer."""
        for name, stored in self._stored.items():
            for layer, value in results.items():
                if name == "previous":
                    stored[layer] = value
                else:
                    stored.setdefault(layer, value)
