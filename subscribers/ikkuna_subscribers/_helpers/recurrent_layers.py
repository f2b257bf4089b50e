"""Recurrent layers of a network, and the gates that the rows of their parameters belong to."""

import re
from collections.abc import Callable, Iterable

from ikkuna.visualization.module_table import ModuleEntry

__all__ = ["RecurrentLayers"]

_PARAMETER = re.compile(
    r"(?P<part>(?:weight|bias)_(?:ih|hh))(?P<ending>(?:_l\d+)?(?:_reverse)?)(?:_[gv]|\.original\d+)?"
)
_GATES = {1: ("h",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}
_COUNT_OF_CLASS = {"RNN": 1, "GRU": 3, "LSTM": 4}


class RecurrentLayers:
    """Recognises recurrent layers by the names and shapes of their weights.

    This includes subclasses and layers of other libraries.

    The ``weight_hh`` ``(gates * H, H)`` of an LSTM has 4 gates (more rows per column if its outputs are projected), of a GRU 3,
    of an RNN 1.
    A parameter that such a weight is computed from, by ``weight_norm`` or another parametrisation, stacks the same gates
    if it has the same number of rows.  Its other axis has another meaning, so the class then gives the number of gates.

    Parameters
    ----------
    network : callable
        Returns the modules of the network; it is called again for a module that was not among them before.

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
        """Return the names of the gates whose rows a parameter stacks; empty for a parameter without gates."""
        return self._of(module).get(path, ())

    def is_recurrent(self, module: str) -> bool:
        """Return whether a module is a recurrent layer or cell."""
        return bool(self._of(module))

    def is_sequential(self, module: str) -> bool:
        """Return whether a module is a recurrent layer, which returns a sequence; a cell returns one timestep."""
        return any("_l0" in path for path in self._of(module))

    def _of(self, module: str) -> dict[str, tuple[str, ...]]:
        if module not in self._gates:
            self._gates = {entry.name: _gates_of(entry) for entry in self._network()}
        return self._gates.setdefault(module, {})


_Stacked = list[tuple[str, re.Match[str], tuple[int, ...]]]


def _gates_of(entry: ModuleEntry) -> dict[str, tuple[str, ...]]:
    """Return the gates that each parameter stacks, by its name."""
    stacked: _Stacked = [
        (path, found, shape) for path, shape in entry.parameters if shape and (found := _PARAMETER.fullmatch(path))
    ]
    rows = {found["ending"]: _rows(stacked, found["ending"]) for _, found, _ in stacked}
    gates = {ending: _GATES.get(_count(entry, stacked, ending), ()) for ending in rows}
    return {
        path: gates[found["ending"]]
        for path, found, shape in stacked
        if gates[found["ending"]] and shape[0] == rows[found["ending"]]
    }


def _rows(stacked: _Stacked, ending: str) -> int:
    """Return the number of rows of the parameters of one layer and direction.

    A parameter without parametrisation decides; if there is none, the largest number of rows.
    """
    of_this = [
        (path == found["part"] + ending, shape[0]) for path, found, shape in stacked if found["ending"] == ending
    ]
    return max(of_this)[1]


def _count(entry: ModuleEntry, stacked: _Stacked, ending: str) -> int:
    """Return the number of gates, 0 if it is unknown."""
    for path, _, shape in stacked:
        if path == f"weight_hh{ending}" and len(shape) == 2 and shape[1]:
            return min(shape[0] // shape[1], 4)
    return _COUNT_OF_CLASS.get(entry.class_name.removesuffix("Cell"), 0)
