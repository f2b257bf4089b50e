"""Adds the modules that a heat map should have and that never arrived."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.module_order import ModuleOrder
from ikkuna.visualization.module_table import ModuleEntry

__all__ = ["with_missing_rows"]


def with_missing_rows(
    modules: Sequence[ModuleEntry],
    kind: str,
    names: tuple[str, ...],
    values: NDArray[np.float64],
    present: NDArray[np.bool_],
) -> tuple[tuple[str, ...], NDArray[np.float64], NDArray[np.bool_]]:
    """Return names and values with an empty row for each module without a value, in the order of the network.

    If most modules have no value, the kind was recorded for some modules only, and nothing is added.

    Examples
    --------
    >>> modules = [ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in ("a", "b", "c")]
    >>> with_missing_rows(modules, "weights_norm2", ("a", "c"), np.ones((2, 1)), np.ones((2, 1), bool))[0]
    ('a', 'b', 'c')
    """
    wanted = [name for name in _expected(modules, kind) if name not in names]
    if not wanted or len(wanted) > len(names):
        return names, values, present
    order = ModuleOrder(modules)
    every = sorted((*names, *wanted), key=order.key)
    places = [every.index(name) for name in names]
    filled, there = np.full((len(every), values.shape[1]), np.nan), np.zeros((len(every), values.shape[1]), bool)
    filled[places], there[places] = values, present
    return tuple(every), filled, there


def _expected(modules: Sequence[ModuleEntry], kind: str) -> list[str]:
    if kind.startswith(("activations", "layer_gradients")):
        return [entry.name for entry in modules]
    if kind.startswith("weight"):
        return [entry.name for entry in modules if any(name == "weight" for name, _ in entry.parameters)]
    return []
