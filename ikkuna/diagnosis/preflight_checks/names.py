"""Names of modules and parameters in messages."""

from collections.abc import Collection, Sequence
from itertools import takewhile

__all__ = ["common_module", "counted", "listed", "module_of"]


def module_of(parameter: str) -> str:
    """Return the name of the module that owns a parameter.

    Examples
    --------
    >>> module_of("encoder.0.weight"), module_of("scale")
    ('encoder.0', '')
    """
    return parameter.rpartition(".")[0]


def common_module(parameters: Sequence[str]) -> str | None:
    """Return the name of the innermost module that contains all parameters; ``None`` if that is the whole model.

    Examples
    --------
    >>> common_module(["encoder.0.weight", "encoder.0.bias"]), common_module(["encoder.0.weight", "encoder.10.weight"])
    ('encoder.0', 'encoder')
    """
    modules = [module_of(name).split(".") for name in parameters]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared) or None


def listed(names: Collection[str], most: int = 4) -> str:
    """Return the first names, and how many more there are.

    Examples
    --------
    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    first = ", ".join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 parameters``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
