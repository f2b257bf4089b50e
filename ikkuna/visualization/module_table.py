"""The modules of a network, and a page of text with a table of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ModuleEntry", "module_table"]

Shape = tuple[int, ...] | None
"""``None`` for a parameter without a shape, such as that of a lazy module."""


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """The description of a module.

    Parameters
    ----------
    name : str
        Its dotted name.
    class_name : str
        The name of its class.
    parameters : tuple of tuple
        Name and shape of each parameter that it owns and does not share with an earlier module.
    aliases : tuple of str
        Other names of the module.
    """

    name: str
    class_name: str
    parameters: tuple[tuple[str, Shape], ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of elements of all parameters that have a shape."""
        return sum(math.prod(shape) for _, shape in self.parameters if shape is not None)


def module_table(modules: Sequence[ModuleEntry]) -> str:
    """Return a Markdown table with name, class, number of parameters and their shapes.

    Examples
    --------
    >>> print(module_table([ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")]))
    | # | module | class | parameters | shapes |
    |--:|:--|:--|--:|:--|
    | 0 | `fc` | Linear | 8 | weight 2×3, bias 2 |
    | 1 | `act` | ReLU | 0 |  |
    <BLANKLINE>
    2 modules, 8 parameters.
    """
    lines = ["| # | module | class | parameters | shapes |", "|--:|:--|:--|--:|:--|"]
    for number, entry in enumerate(modules):
        shapes = ", ".join(f"{name} {_shape(shape)}" for name, shape in entry.parameters)
        cells = (str(number), f"`{entry.name.replace('`', chr(39))}`", entry.class_name, f"{entry.count:,}", shapes)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    total = sum(entry.count for entry in modules)
    return "\n".join([*lines, "", f"{len(modules):,} modules, {total:,} parameters."])


def _shape(shape: Shape) -> str:
    if shape is None:
        return "not known yet"
    return "×".join(map(str, shape)) or "scalar"
