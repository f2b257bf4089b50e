"""The modules of a network, found by the names of series."""

import math
from collections.abc import Iterable
from functools import cached_property

from ikkuna.visualization.module_table import ModuleEntry

__all__ = ["Network"]


class Network:
    """The modules of a network in their order.

    A series has the name of a module, with the name of a parameter (``lstm.weight_ih_l0``) or of an output (``lstm:1.0``) appended.

    Parameters
    ----------
    modules : iterable of ModuleEntry
        The modules.

    Examples
    --------
    >>> network = Network([ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")])
    >>> network.position("act"), network.class_of("fc"), network.shape_of("fc"), network.is_matrix("fc")
    (1, 'Linear', (2, 3), True)
    >>> network.named("ReLU", "GELU")
    ('act',)
    """

    def __init__(self, modules: Iterable[ModuleEntry] = ()) -> None:
        self.modules = tuple(modules)
        self._positions = {entry.name: i for i, entry in enumerate(self.modules)}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.modules:
            for role, shape in entry.parameters:
                name = entry.name if role == "weight" else f"{entry.name}.{role}"
                if shape is not None:
                    shapes.setdefault(name, shape)
        return shapes

    def module(self, series: str | None) -> str | None:
        """Return the module that a series belongs to; ``None`` if it is unknown."""
        name = (series or "").partition(":")[0]
        while name and name not in self._positions:
            name = name.rpartition(".")[0]
        return name or None

    def position(self, series: str | None) -> int:
        """Return the position of a series' module; behind all others if it is unknown."""
        return self._positions.get(self.module(series) or "", len(self.modules))

    def class_of(self, series: str | None) -> str:
        """Return the class name of a series' module; empty if it is unknown."""
        module = self.module(series)
        return "" if module is None else self.modules[self._positions[module]].class_name

    def shape_of(self, series: str) -> tuple[int, ...] | None:
        """Return the shape of the parameter of a series; ``None`` if it is unknown."""
        return self._shapes.get(series)

    def is_matrix(self, series: str) -> bool:
        """Return whether a series is that of a weight with two or more axes; an unknown shape counts as a matrix."""
        shape = self.shape_of(series)
        return shape is None or len(shape) > 1

    def size_of(self, series: str) -> int:
        """Return the number of elements of the parameter of a series; 1 if it is unknown."""
        return math.prod(self.shape_of(series) or (1,))

    def is_normalised(self, series: str) -> bool:
        """Return whether the next module normalises what the module of a series returns.

        The scale of the module's weight does then not change the outputs of the network, and its gradient is inversely proportional
        to that scale.  The next module is that of the order of registration, without containers.

        Examples
        --------
        >>> network = Network([ModuleEntry("conv", "Conv2d"), ModuleEntry("norm", "BatchNorm2d"), ModuleEntry("fc", "Linear")])
        >>> network.is_normalised("conv"), network.is_normalised("fc")
        (True, False)
        """
        following = self.modules[self.position(series) + 1 :]
        return bool(following) and "Norm" in following[0].class_name

    def named(self, *classes: str) -> tuple[str, ...]:
        """Return the names of the modules of some classes."""
        return tuple(entry.name for entry in self.modules if entry.class_name in classes)
