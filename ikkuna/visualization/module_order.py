"""The order of modules in their network, for names of series."""

from collections.abc import Iterable

from ikkuna.visualization.module_table import ModuleEntry
from ikkuna.visualization.names import natural_key

__all__ = ["ModuleOrder"]


class ModuleOrder:
    """Knows where in a network the module of a series stands; of a network nobody described it knows nothing.

    Examples
    --------
    >>> order = ModuleOrder([ModuleEntry("stem", "Linear"), ModuleEntry("lstm", "LSTM")])
    >>> sorted(["lstm:1.0", "lstm.weight_ih_l10", "lstm.weight_ih_l2", "stem"], key=order.key)
    ['stem', 'lstm.weight_ih_l2', 'lstm.weight_ih_l10', 'lstm:1.0']
    >>> order.belongs("lstm:1.0"), order.belongs("group 0")
    (True, False)
    """

    def __init__(self, modules: Iterable[ModuleEntry] = ()) -> None:
        self._places = {name: i for i, entry in enumerate(modules) for name in (entry.name, *entry.aliases)}

    def _place(self, name: str) -> int | None:
        """Return the place of a module, or of the one whose parameter or output it is."""
        while name not in self._places and (end := max(name.rfind("."), name.rfind(":"))) > 0:
            name = name[:end]
        return self._places.get(name)

    def belongs(self, name: str) -> bool:
        """Whether `name` is that of a module, a parameter or an output; every name is where no module is known."""
        return not self._places or self._place(name) is not None

    def key(self, name: str) -> tuple[int, list[str | int]]:
        """Return what to sort names by; those that belong nowhere come last."""
        place = self._place(name)
        return len(self._places) if place is None else place, natural_key(name)
