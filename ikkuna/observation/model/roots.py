"""The observed modules: roots, names, stages of a pipeline, and the identity of a model in a checkpoint."""

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import jit, nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.support.failures import suppressed
from ikkuna.support.modules import ModuleFilter, NamedModule, named_modules, unwrap, walk


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
        See `ikkuna.support.modules.walk`.
    module_filter : list of type, or callable, optional
        See `ikkuna.support.modules.walk`.

    Attributes
    ----------
    all : tuple of Root
        The added modules.
    model : nn.Module or None
        The whole model, if it was set; modules that were added without a name get their names in it.
    callable : tuple of nn.Module
        The modules whose calls are forwards of the model: the model itself if it was set, otherwise all added modules.
    """

    def __init__(self, depth: int, module_filter: ModuleFilter) -> None:
        self.depth = depth
        self.module_filter = module_filter
        self.model: nn.Module | None = None
        self.all: tuple[Root, ...] = ()
        self.callable: tuple[nn.Module, ...] = ()

    def __contains__(self, module: nn.Module) -> bool:
        return any(root.module is module for root in self.all)

    def change(self, roots: "tuple[Root, ...] | None" = None, model: nn.Module | None = None) -> None:
        """Set the added modules, or the whole model."""
        self.all, self.model = self.all if roots is None else roots, model or self.model
        self.callable = (self.model,) if self.model is not None else tuple([root.module for root in self.all])

    @property
    def whole(self) -> nn.Module | None:
        """The module that is the whole model; ``None`` if several modules were added and none was set."""
        return found[0] if len(found := self.callable) == 1 else None

    def resolve(self, roots: Iterable[Root], taken: frozenset[str] = frozenset()) -> tuple[NamedModule, ...]:
        """Return the observed modules below `roots`, each module once and under a unique name.

        Raises
        ------
        ConfigError
            If a name is among `taken`, or the filter matches nothing.
        """
        modules = self._numbered([self._walk(root) for root in roots])
        if known := next((named.name for named in modules if named.name in taken), None):
            raise ConfigError(
                f"another exporter on this bus observes a module {known!r} already; "
                "add this one as a pair ('a name', module)"
            )
        return modules

    def find(self, roots: Iterable[Root], taken: frozenset[str] = frozenset()) -> tuple[NamedModule, ...]:
        """Return the observed modules below `roots`, which may have changed since they were added.

        A module whose name is among `taken` gets a number behind it; nothing is observed below a root where the filter matches nothing.
        """
        found: list[tuple[NamedModule, ...]] = []
        for root in roots:
            with suppressed(ConfigError):
                found.append(self._walk(root))
        return self._numbered(found, taken)

    def _walk(self, root: Root) -> tuple[NamedModule, ...]:
        """Return the observed modules below a root, under their names in the whole model if the root has no name."""
        modules = walk(root.module, root.name, self.depth, self.module_filter, root.recursive)
        if root.name is not None or self.model is None:
            return modules
        inside = {id(module): name for name, module in named_modules(self.model) if name}
        return tuple(replace(named, name=inside.get(id(named.module), named.name)) for named in modules)

    def _numbered(
        self, found: Iterable[Iterable[NamedModule]], taken: frozenset[str] = frozenset()
    ) -> tuple[NamedModule, ...]:
        """Return each module once; a name that is used already, or is among `taken`, gets a number behind it."""
        modules: dict[int, NamedModule] = {}
        used = set(taken)
        for named in (named for modules_of_root in found for named in modules_of_root):
            if id(named.module) not in modules:
                name = named.name
                if name in used:
                    name = next(free for i in count(1) if (free := f"{named.name}_{i}") not in used)
                    named = replace(named, name=name)
                modules[id(named.module)] = named
                used.add(name)
        return tuple(modules.values())


@dataclass(frozen=True, slots=True)
class StagePosition:
    """The place of a stage in its pipeline.

    Parameters
    ----------
    index : int
        The number of the stage, from 0.
    count : int
        The number of stages.
    """

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether the stage receives the inputs of the model."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the outputs of the model."""
        return self.index == self.count - 1


def stage_positions(modules: Iterable[nn.Module]) -> dict[int, StagePosition]:
    """Return the places of those `modules` that are stages of a pipeline, by their ids.

    Stages are found among all objects of the process, because a module does not know its stage.
    """
    wanted = {id(module) for module in modules}
    return {
        id(module): StagePosition(stage.stage_index, stage.num_stages)
        for stage, module in _stages()
        if id(module) in wanted
    }


def stage_within(root: nn.Module) -> nn.Module | None:
    """Return a stage that is a part of `root`, rather than `root` itself; ``None`` if there is none."""
    stages = [module for _, module in _stages()]
    inside = {id(module) for module in root.modules() if module is not root} if stages else set()
    return next((module for module in stages if id(module) in inside), None)


def parted(root: Root) -> tuple[Root, ...]:
    """Return the stages of a pipeline as roots of their own if `root` is a ``ModuleDict`` or ``ModuleList`` of stages alone."""
    parts = dict(root.module.named_children()) if isinstance(root.module, nn.ModuleDict | nn.ModuleList) else {}
    stages = {id(module) for _, module in _stages()} if parts else set()
    if not parts or not stages.issuperset(id(unwrap(part)) for part in parts.values()):
        return (root,)
    prefix = "" if root.name is None else f"{root.name}."
    return tuple(Root(unwrap(part), prefix + name, root.recursive) for name, part in parts.items())


def _stages() -> Iterator[tuple[Any, nn.Module]]:
    module = sys.modules.get("torch.distributed.pipelining.stage")
    base = getattr(module, "_PipelineStageBase", None)
    if base is None or not torch.distributed.is_initialized():
        return
    for found in gc.get_objects():
        if issubclass(type(found), base) and isinstance(getattr(found, "submod", None), nn.Module):
            yield found, unwrap(found.submod)
