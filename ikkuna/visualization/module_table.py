"""The modules of a network, and a page of text with a table of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ModuleEntry", "module_table", "read_module_table"]

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


def read_module_table(text: str) -> tuple[ModuleEntry, ...]:
    """Return the modules of a table written by :func:`module_table`, without their aliases; lines of another form are skipped.

    Examples
    --------
    >>> entries = [ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")]
    >>> read_module_table(module_table(entries)) == tuple(entries)
    True
    """
    found = []
    for line in text.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[0].isdigit():
            parameters = tuple(_parameter(part) for part in cells[4].split(", ") if " " in part)
            found.append(ModuleEntry(cells[1].strip("`"), cells[2], parameters))
    return tuple(found)


def _parameter(text: str) -> tuple[str, Shape]:
    name, _, shape = text.partition(" ")
    if shape == "scalar":
        return name, ()
    sizes = shape.split("×")
    return name, tuple(map(int, sizes)) if all(map(str.isdigit, sizes)) else None
