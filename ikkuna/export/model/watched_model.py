"""The model that an exporter observes."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.model.own_loss import takes_labels
from ikkuna.export.model.roots import Root, Roots
from ikkuna.export.model.stages import StagePosition, stage_positions, stage_within
from ikkuna.logger import log
from ikkuna.modules import NamedModule, class_name, name_of, unwrap

__all__ = ["ModuleChange", "WatchedModel"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """The difference between the modules that were observed before and those that are observed now.

    Parameters
    ----------
    replaced, added, removed : tuple of str
        The names of modules.

    Examples
    --------
    >>> fc, head = NamedModule("fc", nn.Linear(2, 2)), NamedModule("head", nn.Linear(2, 2))
    >>> print(ModuleChange.between((fc, head), (NamedModule("fc", nn.Linear(2, 2)),)))
    replaced fc; removed head
    """

    replaced: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @classmethod
    def between(cls, before: Iterable[NamedModule], now: Iterable[NamedModule]) -> "ModuleChange":
        """Return the difference between two sets of modules, which are compared by name and identity."""
        old, new = ({named.name: named.module for named in modules} for modules in (before, now))
        return cls(
            tuple(name for name in old if name in new and new[name] is not old[name]),
            tuple(name for name in new if name not in old),
            tuple(name for name in old if name not in new),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return self.replaced + self.added + self.removed

    def __str__(self) -> str:
        parts = (("replaced", self.replaced), ("added", self.added), ("removed", self.removed))
        return "; ".join(f"{what} {_listed(names)}" for what, names in parts if names)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _is_more_than_a_stage(root: nn.Module, stage: nn.Module) -> str:
    name = name_of(root, stage)
    return (
        f"of the {class_name(root)} this process runs only {name!r}, a stage of a pipeline; "
        f"add the stage under its name in the model: add_modules(({name!r}, stage_module))"
    )


class WatchedModel:
    """Roots, observed modules and loss module of one exporter.

    Parameters
    ----------
    roots : Roots
        The added modules.

    Attributes
    ----------
    modules : tuple of NamedModule
        The observed modules.
    loss : nn.Module, optional
        The module that computes the loss.
    is_compiled : bool
        Whether the model runs as a compiled program.
    stages : dict of int to StagePosition
        The places of the roots that are stages of a pipeline, by their ids.
    """

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.modules: tuple[NamedModule, ...] = ()
        self.loss: nn.Module | None = None
        self.is_compiled = False
        self.stages: dict[int, StagePosition] = {}
        self._knows_stages = False

    @property
    def callable(self) -> tuple[nn.Module, ...]:
        """The modules whose calls are forwards of the model."""
        return self.roots.callable

    def set_model(self, model: nn.Module) -> nn.Module:
        """Set the module that is the whole model; return it without wrappers.

        Raises
        ------
        ConfigError
            If another model was set before.
        """
        model, known = unwrap(model), self.roots.model
        if known is not None and known is not model:
            raise ConfigError(
                f"the model is a {class_name(known)} already; close() this exporter and create another one for a second model"
            )
        self.roots.model = model
        return model

    def the_model(self) -> nn.Module:
        """Return the module that is the whole model; raise `ConfigError` if several were added and none was set."""
        if (model := self.roots.whole) is None:
            count = len(self.roots.all)
            raise ConfigError(f"evaluate() needs one model, but {count} were added; choose one with set_model()")
        return model

    def observe(self, roots: tuple[Root, ...], taken: frozenset[str]) -> None:
        """Observe what is below `roots`, under names that are not among `taken`."""
        for root in roots:
            if root.module not in self.roots and (stage := stage_within(root.module)) is not None:
                raise ConfigError(_is_more_than_a_stage(root.module, stage))
        self.modules = self.roots.resolve(roots, taken)
        self.roots.all = roots
        self._knows_stages = False

    def follow(self, taken: frozenset[str]) -> "ModuleChange":
        """Observe the modules that are below the roots now; return the difference to those that were observed before.

        A new module whose name is among `taken` gets a number behind it.
        If the filter matches none of the modules any more, none is observed.
        """
        before, self.modules = self.modules, self.roots.find(self.roots.all, taken)
        return ModuleChange.between(before, self.modules)

    # -- pipelines ------------------------------------------------------------------------------------------------

    def find_stages(self) -> None:
        """Find the roots that are stages of a pipeline, at the first step after they were added."""
        if self._knows_stages:
            return
        self._knows_stages = True
        self.stages = stage_positions(self.callable)
        for root in self.callable:  # the stage may have been made after its model was added
            if (stage := stage_within(root)) is not None:
                log.error("%s", _is_more_than_a_stage(root, stage))

    def takes_input(self, root: nn.Module) -> bool:
        """Whether a root receives the inputs of the model, rather than the outputs of another stage."""
        stage = self.stages.get(id(root))
        return stage is None or stage.is_first

    def returns_output(self, root: nn.Module) -> bool:
        """Whether a root returns the outputs of the model, rather than the inputs of another stage."""
        stage = self.stages.get(id(root))
        return stage is None or stage.is_last

    @property
    def sees_loss(self) -> bool:
        """Whether this process may compute the loss; of a pipeline only the last stage does."""
        return not self.stages or any(stage.is_last for stage in self.stages.values())

    @property
    def sees_arguments_of_loss(self) -> bool:
        """Whether the outputs and labels are known from which the loss is computed."""
        return self.loss is not None or any(map(takes_labels, self.callable))

    def names_by_stage(self) -> dict[str, list[str]]:
        """Return the names of the modules of each stage of a pipeline, by the stage's number."""
        found: dict[str, list[str]] = {}
        for root in self.callable:
            if (stage := self.stages.get(id(root))) is not None:
                inside = {id(module) for module in root.modules()}
                names = [named.name for named in self.modules if id(named.module) in inside]
                found.setdefault(str(stage.index), []).extend(names)
        return found
