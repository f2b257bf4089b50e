"""The model that an exporter observes."""

from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.model.roots import Root, Roots
from ikkuna.modules import NamedModule, class_name, unwrap

__all__ = ["WatchedModel"]


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
    """

    def __init__(self, roots: Roots) -> None:
        self.roots = roots
        self.modules: tuple[NamedModule, ...] = ()
        self.loss: nn.Module | None = None
        self.is_compiled = False

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
        self.modules = self.roots.resolve(roots, taken)
        self.roots.all = roots

    def has_changed(self) -> bool:
        """Whether the user has replaced modules below the roots."""
        found = {id(named.module) for named in self.roots.resolve(self.roots.all)}
        return found != {id(named.module) for named in self.modules}
