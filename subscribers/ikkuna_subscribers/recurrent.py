"""Which parameters of a network are those of recurrent layers, and which gates their rows belong to."""

import re
from collections.abc import Callable, Iterable

from ikkuna.visualization.module_table import ModuleEntry

__all__ = ["RecurrentLayers"]

_PARAMETER = re.compile(r"(?:weight|bias)_(?:ih|hh)((?:_l\d+)?(?:_reverse)?)")
_GATES = {1: ("h",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}


class RecurrentLayers:
    """Knows recurrent layers by the shape of their weights, so that subclasses and layers of others are known too.

    Of ``weight_hh`` (gates * H, H) an LSTM has 4 gates (more rows still, if its outputs are projected), a GRU 3, an RNN 1.

    Parameters
    ----------
    network : returns the modules there are; asked again when a module is met that was not among them

    Examples
    --------
    >>> lstm = ModuleEntry("lstm", "LSTM", (("weight_ih_l0", (12, 2)), ("weight_hh_l0", (12, 3))))
    >>> layers = RecurrentLayers(lambda: [lstm])
    >>> layers.gates("lstm", "weight_ih_l0"), layers.gates("lstm", "weight_hr_l0"), layers.gates("fc", "")
    (('i', 'f', 'g', 'o'), (), ())
    """

    def __init__(self, network: Callable[[], Iterable[ModuleEntry]]) -> None:
        self._network = network
        self._gates: dict[str, dict[str, tuple[str, ...]]] = {}

    def gates(self, module: str, path: str) -> tuple[str, ...]:
        """Return the names of the gates whose rows a parameter stacks; none for a parameter of another kind."""
        found = _PARAMETER.fullmatch(path)
        return self._of(module).get(found[1], ()) if found else ()

    def is_recurrent(self, module: str) -> bool:
        """Whether a module is a recurrent layer."""
        return bool(self._of(module))

    def _of(self, module: str) -> dict[str, tuple[str, ...]]:
        if module not in self._gates:
            self._gates = {entry.name: _gates_of(entry) for entry in self._network()}
        return self._gates.setdefault(module, {})


def _gates_of(entry: ModuleEntry) -> dict[str, tuple[str, ...]]:
    """Return the gates by layer and direction, as the endings of names tell them."""
    gates: dict[str, tuple[str, ...]] = {}
    for path, shape in entry.parameters:
        found = _PARAMETER.fullmatch(path)
        if found and path.startswith("weight_hh") and shape is not None and len(shape) == 2 and shape[1]:
            gates[found[1]] = _GATES.get(min(shape[0] // shape[1], 4), ())
    return {ending: names for ending, names in gates.items() if names}
