"""The model that an exporter observes, and its loss."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import jit, nn

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.observation.model.roots import Root, Roots, StagePosition, stage_positions, stage_within
from ikkuna.printable import listed
from ikkuna.support.failures import log, raise_users_exception
from ikkuna.support.modules import NamedModule, class_name, name_of, unwrap
from ikkuna.support.torch_internals import BATCH_NORMS


class LossFunction(nn.Module):
    """A module that calls a function of outputs and labels.

    Parameters
    ----------
    function : callable
        Its defaults of ``reduction`` and ``ignore_index`` say how its losses of several micro-batches make one loss.

    Examples
    --------
    >>> from functools import partial
    >>> from torch.nn import functional as F
    >>> loss = LossFunction(partial(F.cross_entropy, ignore_index=0))
    >>> loss.reduction, loss.ignore_index
    ('mean', 0)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:  # some functions written in C have no signature
            raise_users_exception(error)
            parameters = {}  # type: ignore[assignment]
        for name in ("reduction", "ignore_index"):
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            setattr(self, name, None if default is inspect.Parameter.empty else default)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def observable_loss(loss: Any) -> nn.Module:
    """Return a module, or a module that calls a function or a scripted module; raise `ConfigTypeError` if `loss` is neither."""
    if isinstance(loss, nn.Module) and not isinstance(loss, jit.ScriptModule):
        return loss
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}; pass an instance" if isinstance(loss, type) else type(loss).__name__
        raise ConfigTypeError(
            f"set_loss() needs a module such as nn.CrossEntropyLoss() or a function of (output, labels), got {what}"
        )
    return LossFunction(loss)


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
        return "; ".join(f"{what} {listed(names, _SHOWN)}" for what, names in parts if names)


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
        self._momenta: list[tuple[Any, float | None]] = []
        self.loss: nn.Module | None = None
        self.is_compiled = False
        self.stages: dict[int, StagePosition] = {}
        self.knows_stages = False

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
        self.roots.change(model=model)
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
        self._set_modules(self.roots.resolve(roots, taken))
        self.roots.change(roots)
        self.knows_stages = False

    def follow(self, taken: frozenset[str]) -> "ModuleChange":
        """Observe the modules that are below the roots now; return the difference to those that were observed before.

        A new module whose name is among `taken` gets a number behind it.
        If the filter matches none of the modules any more, none is observed.
        """
        before = self.modules
        self._set_modules(self.roots.find(self.roots.all, taken))
        return ModuleChange.between(before, self.modules)

    def _set_modules(self, modules: tuple[NamedModule, ...]) -> None:
        self.modules, known = modules, {id(norm): momentum for norm, momentum in self._momenta}
        norms: list[Any] = [named.module for named in modules if isinstance(named.module, BATCH_NORMS)]
        self._momenta = [(norm, known.get(id(norm), norm.momentum)) for norm in norms]

    @property
    def estimates_statistics(self) -> bool:
        """Whether a batch norm has another momentum than when it was first observed.

        Functions that compute the statistics of batch norms anew change it for their forwards, as `torch.optim.swa_utils.update_bn`.
        """
        return any(norm.momentum != momentum for norm, momentum in self._momenta)

    # -- pipelines ------------------------------------------------------------------------------------------------

    def find_stages(self) -> None:
        """Find the roots that are stages of a pipeline, at the first step after they were added."""
        self.knows_stages = True
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

    def names_by_stage(self) -> dict[str, list[str]]:
        """Return the names of the modules of each stage of a pipeline, by the stage's number."""
        found: dict[str, list[str]] = {}
        for root in self.callable:
            if (stage := self.stages.get(id(root))) is not None:
                inside = {id(module) for module in root.modules()}
                names = [named.name for named in self.modules if id(named.module) in inside]
                found.setdefault(str(stage.index), []).extend(names)
        return found
