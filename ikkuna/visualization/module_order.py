"""The order of names of series."""

from collections.abc import Iterable

from ikkuna.visualization.module_table import ModuleEntry
from ikkuna.visualization.names import natural_key

__all__ = ["ModuleOrder"]


class ModuleOrder:
    """Sorts names of series by the position of their modules in the network.

    Parameters
    ----------
    modules : iterable of ModuleEntry
        The modules in their order in the network.  If there are none, all names are sorted alphabetically.

    Examples
    --------
    >>> order = ModuleOrder([ModuleEntry("stem", "Linear"), ModuleEntry("lstm", "LSTM")])
    >>> sorted(["lstm:1.0", "lstm.weight_ih_l10", "lstm.weight_ih_l2", "stem"], key=order.key)
    ['stem', 'lstm.weight_ih_l2', 'lstm.weight_ih_l10', 'lstm:1.0']
    >>> order.belongs("lstm:1.0"), order.belongs("group 0")
    (True, False)
    """

    def __init__(self, modules: Iterable[ModuleEntry] = ()) -> None:
        self.modules = tuple(modules)
        self._positions = {name: i for i, entry in enumerate(self.modules) for name in (entry.name, *entry.aliases)}

    def _position(self, name: str) -> int | None:
        """Return the position of the module with this name, or of the module with a parameter or output of this name."""
        while name not in self._positions and (end := max(name.rfind("."), name.rfind(":"))) > 0:
            name = name[:end]
        return self._positions.get(name)

    def belongs(self, name: str) -> bool:
        """Return whether `name` is a module, a parameter or an output; always ``True`` without modules."""
        return not self._positions or self._position(name) is not None

    def key(self, name: str) -> tuple[int, list[str | int]]:
        """Return the sorting key of a name; names that belong to no module come last."""
        position = self._position(name)
        return len(self._positions) if position is None else position, natural_key(name)
