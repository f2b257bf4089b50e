"""The modules that were added to an exporter, and the names of the modules below them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import jit, nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.modules import ModuleFilter, NamedModule, named_modules, unwrap, walk

__all__ = ["Root", "Roots"]


@dataclass(frozen=True, slots=True, eq=False)
class Root:
    """A module that was added, with its name if it has one; `recursive` if the modules inside it are observed, too."""

    module: nn.Module
    name: str | None = None
    recursive: bool = True

    @classmethod
    def of(cls, module: Any, recursive: bool) -> "Root":
        """Return the root of a module or of a pair ``(name, module)``; raise `ConfigTypeError` for anything else."""
        name = None
        if isinstance(module, tuple):
            if len(module) != 2 or not isinstance(module[0], str) or not isinstance(module[1], nn.Module):
                got = ", ".join(type(part).__name__ for part in module)
                raise ConfigTypeError(f"add_modules() needs a pair (name, module), got ({got})")
            name, module = module
        if not isinstance(module, nn.Module):
            raise ConfigTypeError(
                f"add_modules() needs a torch.nn.Module or a (name, module) pair, got {type(module).__name__}"
            )
        if isinstance(module, jit.ScriptModule):
            raise ConfigError("hooks cannot be attached to a scripted module; add the module before scripting it")
        return cls(unwrap(module), name, recursive)


class Roots:
    """The modules that were added to an exporter.

    Parameters
    ----------
    depth : int
        See `ikkuna.modules.walk`.
    module_filter : list of type, or callable, optional
        See `ikkuna.modules.walk`.

    Attributes
    ----------
    all : tuple of Root
        The added modules.
    model : nn.Module or None
        The whole model, if it was set; modules that were added without a name get their names in it.
    """

    def __init__(self, depth: int, module_filter: ModuleFilter) -> None:
        self.depth = depth
        self.module_filter = module_filter
        self.model: nn.Module | None = None
        self.all: tuple[Root, ...] = ()

    def __contains__(self, module: nn.Module) -> bool:
        return any(root.module is module for root in self.all)

    @property
    def callable(self) -> tuple[nn.Module, ...]:
        """The modules whose calls are forwards of the model: the model itself if it was set, otherwise all added modules."""
        return (self.model,) if self.model is not None else tuple(root.module for root in self.all)

    @property
    def whole(self) -> nn.Module | None:
        """The module that is the whole model; ``None`` if several modules were added and none was set."""
        return self.callable[0] if len(self.callable) == 1 else None

    def resolve(self, roots: Iterable[Root], taken: frozenset[str] = frozenset()) -> tuple[NamedModule, ...]:
        """Return the observed modules below `roots`, each module once and under a unique name.

        Raises
        ------
        ConfigError
            If a name is among `taken`, or the filter matches nothing.
        """
        inside = {} if self.model is None else {id(module): name for name, module in named_modules(self.model) if name}
        found: dict[int, NamedModule] = {}
        own: set[str] = set()
        for root in roots:
            names = inside if root.name is None else {}
            for named in walk(root.module, root.name, self.depth, self.module_filter, root.recursive):
                if id(named.module) not in found:
                    renamed = _renamed(named, names.get(id(named.module), named.name), own, taken)
                    found[id(named.module)] = renamed
                    own.add(renamed.name)
        return tuple(found.values())


def _renamed(named: NamedModule, name: str, own: set[str], taken: frozenset[str]) -> NamedModule:
    if name in taken:
        raise ConfigError(
            f"another exporter on this bus observes a module {name!r} already; add this one as a pair ('a name', module)"
        )
    if name in own:
        name = next(numbered for i in range(1, len(own) + 2) if (numbered := f"{name}_{i}") not in own)
    return NamedModule(name, named.module, named.aliases)
