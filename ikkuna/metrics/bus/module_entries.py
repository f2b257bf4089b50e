"""Descriptions of the observed modules."""

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from ikkuna.store.values import ModuleEntry
from ikkuna.support.modules import NamedModule, class_name, parameters_of

__all__ = ["described"]


def described(modules: Iterable[NamedModule]) -> tuple[ModuleEntry, ...]:
    """Return an entry for each module, in the same order; a shared parameter is listed once.

    Examples
    --------
    >>> described([NamedModule("fc", nn.Linear(3, 2))])
    (ModuleEntry(name='fc', class_name='Linear', parameters=(('weight', (2, 3)), ('bias', (2,))), aliases=()),)
    """
    modules = tuple(modules)
    owned: dict[str, list[tuple[str, tuple[int, ...] | None]]] = {}
    for named in parameters_of(modules):
        role = named.path or ("bias" if named.is_bias else "weight")
        owned.setdefault(named.module, []).append((role, _shape(named.parameter)))
    return tuple(
        ModuleEntry(named.name, class_name(named.module), tuple(owned.get(named.name, ())), named.aliases)
        for named in modules
    )


def _shape(parameter: nn.Parameter) -> tuple[int, ...] | None:
    return None if is_lazy(parameter) else tuple(parameter.shape)
