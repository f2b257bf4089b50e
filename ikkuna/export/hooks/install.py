"""The hooks an exporter has on the user's objects, and the modules they were put there for."""

import logging
from collections.abc import Callable

import torch
from torch import nn

from ikkuna.errors import ConfigError
from ikkuna.export.hooks.hook import Undo, tap_loss, tap_optimizers, tap_root
from ikkuna.export.model.roots import Root, Roots
from ikkuna.export.session import Session
from ikkuna.modules import class_name, unwrap

__all__ = ["Attachment"]

log = logging.getLogger("ikkuna")


class Attachment:
    """Puts the few hooks that stay on modules, and takes them off.

    Parameters
    ----------
    observer : who hears the hooks
    roots : the modules that were added
    taken : says which names other exporters of the bus use
    """

    def __init__(self, observer: Session, roots: Roots, taken: Callable[[], frozenset[str]]) -> None:
        self.observer = observer
        self.roots = roots
        self.loss: nn.Module | None = None
        self._taken = taken
        self._undo: list[Undo] = []
        observer.model.resolve = self.resolve
        observer.model.reconsider = self.demand_changed

    def add(self, root: Root) -> None:
        """Look at one more root."""
        if root.module in self.roots:
            log.info("%s is looked at already", class_name(root.module))
        else:
            self.look_at((*self.roots.all, root))

    def set_model(self, model: nn.Module) -> None:
        """Take `model` as the whole network."""
        model, known = unwrap(model), self.roots.model
        if known is not None and known is not model:
            raise ConfigError(
                f"the model is a {class_name(known)} already; close() this exporter and make another for a second one"
            )
        self.roots.model = model
        self.look_at(self.roots.all or (Root(model),))

    def the_model(self) -> nn.Module:
        """Return the module that is the whole network, to be called."""
        if (model := self.roots.whole) is None:
            count = len(self.roots.all)
            raise ConfigError(f"evaluate() needs one model, {count} were added; tell which it is with set_model()")
        return model

    def set_loss(self, loss: nn.Module) -> None:
        """Take `loss` as the module that computes the loss."""
        self.loss = loss
        self.observer.model.sees_loss = True
        self.install()

    def look_at(self, roots: tuple[Root, ...]) -> None:
        """Look at what is below `roots`, and at nothing else."""
        modules = self.roots.resolve(roots, self._taken())
        self.roots.all = roots
        self.observer.model.taps.remove(everything=True)
        self.observer.model.taps.modules = modules
        self.observer.model.taps.roots = self.roots.callable
        self.observer.parameters.track(modules)
        self.install()
        self.demand_changed()

    def demand_changed(self) -> None:
        """Take a change of what subscribers want."""
        if self.observer.demand_changed():
            log.warning("torch.compiler.reset(): the model was compiled before all that is wanted of it now was known")
            torch.compiler.reset()

    def resolve(self) -> None:
        """Look again, in case the user has put other modules in the place of those known."""
        found = {id(named.module) for named in self.roots.resolve(self.roots.all)}
        if found != {id(named.module) for named in self.observer.model.taps.modules}:
            log.info("modules were replaced; the new ones are looked at")
            self.look_at(self.roots.all)

    def install(self) -> None:
        """Put the hooks on that stay: two on each root, one on the loss, two for all optimizers."""
        self.remove()
        for root in self.observer.model.taps.roots:
            self._undo.append(tap_root(root, self.observer.model, self.observer.model.taps.switch))
        if self.loss is not None:
            self._undo.append(tap_loss(self.loss, self.observer.model))
        self._undo.append(tap_optimizers(self.observer.optimizers))

    def remove(self) -> None:
        """Take them off."""
        undo, self._undo = self._undo, []
        for remove in undo:
            remove()
