"""What a person adds to a training script."""

import atexit
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import jit, nn

from ikkuna.errors import ClosedError, ConfigError, ConfigTypeError
from ikkuna.export.clock import TRAINING
from ikkuna.export.messages.bus import MessageBus, get_default_bus
from ikkuna.export.observer import Observer
from ikkuna.export.taps import Undo, blind_after_fork, tap_loss, tap_optimizers, tap_root
from ikkuna.modules import ModuleFilter, NamedModule, class_name, unwrap, walk

__all__ = ["Exporter", "Health"]

log = logging.getLogger("ikkuna")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Health:
    """How the monitor itself is doing.

    Parameters
    ----------
    acked_step : the last step whose values the operating system has; -1 before
    steps : training steps seen
    errors : errors caught, of subscribers and our own
    dropped : values that were lost on their way to a file, and bundles that never met
    disabled : subscribers that are not called any more
    skipped : tensors without numbers and updates there was no memory for
    """

    acked_step: int
    steps: int
    errors: int
    dropped: int
    disabled: tuple[str, ...]
    skipped: int


class Exporter:
    """Looks at modules while they train and publishes what it sees.

    Parameters
    ----------
    depth : int
        -1 to look at leaves and at modules that own parameters; otherwise how deep to look (the root is at 0).
    module_filter : list of classes, or a function of a `NamedModule`
        Which modules to look at; by default all.
    message_bus : MessageBus, optional
        Where to publish; the default bus if none is given.
    log_dir : path, optional
        Where runs are written, each in a sub-directory; ``run`` by default.
    on_error : str
        What happens when a subscriber fails after set-up: ``"disable"`` it after ten failures in a row, only ``"log"``,
        or ``"raise"``, for tests and authors of plugins.

    Raises
    ------
    ConfigError, ConfigTypeError
        For arguments that cannot be meant.
    LogDirError
        If `log_dir` cannot be written.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.export.messages import MessageBus
    >>> from ikkuna.export.subscriber import CallbackSubscriber
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Exporter(message_bus=MessageBus()) as exporter:
    ...     exporter.add_modules(model)
    ...     seen = CallbackSubscriber("weight_updates", lambda message: print(message.global_step, message.name, message.data.shape))
    ...     handle = exporter.message_bus.register_subscriber(seen)
    ...     model(torch.ones(3, 2)).sum().backward()
    ...     optimizer.step()
    0 0 torch.Size([1, 2])
    """

    def __init__(
        self,
        depth: int = -1,
        module_filter: ModuleFilter = None,
        message_bus: MessageBus | None = None,
        *,
        log_dir: str | Path | None = None,
        on_error: str = "disable",
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < -1:
            raise ConfigError(f"depth must be -1 (all) or an int >= 0, got {depth!r}")
        if message_bus is not None and not isinstance(message_bus, MessageBus):
            raise ConfigTypeError(f"message_bus needs a MessageBus, got {type(message_bus).__name__}")
        self.depth = depth
        self.module_filter = module_filter
        self.message_bus = message_bus if message_bus is not None else get_default_bus()
        self.message_bus.faults.set_policy(on_error)
        self.message_bus.attach(self, log_dir)
        self._observer = Observer(self.message_bus)
        self._roots: list[tuple[nn.Module, str | None, bool]] = []
        self._model: nn.Module | None = None
        self._loss: nn.Module | None = None
        self._undo: list[Undo] = []
        self._closed = False
        blind_after_fork(self._observer)
        _close_at_exit(self)

    # -- what to look at ------------------------------------------------------------------------------------------

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The modules looked at, under their names."""
        return self._observer.modules

    @property
    def module_names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(named.name for named in self.modules)

    def add_modules(self, module: nn.Module | tuple[str, nn.Module], recursive: bool = True) -> None:
        """Look at a module, and with `recursive` at what is inside it.

        Parameters
        ----------
        module : nn.Module, or a pair of a name and one
            Names are the module's own dotted paths; with a pair they begin with the name.
        recursive : bool
            False for this one module alone.

        Raises
        ------
        ConfigTypeError
            For anything else.
        ConfigError
            For a scripted module, a filter that matches nothing, or a name that is taken.
        """
        self._require_open()
        name, root = _name_and_module(module)
        if any(root is known for known, _, _ in self._roots):
            log.info("%s is looked at already", class_name(root))
            return
        self._look_at([*self._roots, (root, name, recursive)])

    def __call__(self, module: M, recursive: bool = True) -> M:
        """Look at a module and return it, for use where it is made."""
        self.add_modules(module, recursive)
        return module

    def set_model(self, model: nn.Module) -> None:
        """Tell which module is the whole network: its call is the training forward, and parts added before get their names in it.

        Raises
        ------
        ConfigTypeError
            If it is not a module.
        ConfigError
            If another model was set before.
        """
        self._require_open()
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"set_model() needs a torch.nn.Module, got {type(model).__name__}")
        model = unwrap(model)
        if self._model is not None and self._model is not model:
            raise ConfigError(
                f"the model is a {class_name(self._model)} already; close() this exporter and make another for a second one"
            )
        self._model = model
        self._look_at(self._roots or [(model, None, True)])

    def set_loss(self, loss_module: nn.Module) -> None:
        """Tell which module computes the loss; it publishes ``loss``, ``input_labels`` and ``network_output`` from then on.

        Raises
        ------
        ConfigTypeError
            If it is not a module: a functional loss cannot be seen.
        """
        self._require_open()
        if not isinstance(loss_module, nn.Module):
            raise ConfigTypeError(
                f"set_loss() needs a torch.nn.Module such as nn.CrossEntropyLoss(), got {type(loss_module).__name__}"
            )
        self._loss = loss_module
        self._observer.sees_loss = True
        self._reinstall()

    def _look_at(self, roots: list[tuple[nn.Module, str | None, bool]]) -> None:
        found: dict[int, NamedModule] = {}
        names = _names_in(self._model)
        taken = {name for source in self.message_bus.sources if source is not self for name in source.module_names}
        for root, name, recursive in roots:
            for named in walk(root, name, self.depth, self.module_filter, recursive):
                if id(named.module) not in found:
                    found[id(named.module)] = _renamed(
                        named, {} if name else names, {n.name for n in found.values()}, taken
                    )
        self._roots = roots
        self._observer.modules = tuple(found.values())
        self._observer.parameters.track(self._observer.modules)
        self._observer.roots = (self._model,) if self._model is not None else tuple(root for root, _, _ in roots)
        self._reinstall()

    def _reinstall(self) -> None:
        self._remove_hooks()
        for root in self._observer.roots:
            self._undo.append(tap_root(root, self._observer))
        if self._loss is not None:
            self._undo.append(tap_loss(self._loss, self._observer))
        self._undo.append(tap_optimizers(self._observer))

    def _remove_hooks(self) -> None:
        undo, self._undo = self._undo, []
        for remove in undo:
            remove()

    # -- while training -------------------------------------------------------------------------------------------

    def epoch_finished(self) -> None:
        """Tell that an epoch is over; the next step begins another."""
        self._require_open()
        self._observer.epoch_finished()

    def train(self) -> None:
        """Go back to training after :meth:`test`; what the other pass saw is published."""
        self._observer.begin_pass(TRAINING)

    def test(self, name: str = "testing") -> None:
        """Publish what comes now as another pass, to those who subscribed with ``tag=name``; the model's own mode is left alone."""
        self._require_open()
        self._observer.begin_pass(name)

    def step(self) -> None:
        """Tell that a step is over, where no optimizer does."""
        self._require_open()
        self._observer.clock.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away for the time of a ``with`` block."""
        was, self._observer.blind = self._observer.blind, True
        try:
            yield
        finally:
            self._observer.blind = was

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take every hook off for the time of a ``with`` block, to script a model or save it whole."""
        self._observer.finish()
        self._remove_hooks()
        try:
            yield
        finally:
            if not self._closed:
                self._reinstall()

    def health(self) -> Health:
        """Return how the monitor itself is doing."""
        bus, run = self.message_bus, self.message_bus.run
        return Health(
            acked_step=run.acked_step if run is not None else -1,
            steps=self._observer.steps,
            errors=bus.faults.errors,
            dropped=(run.dropped if run is not None else 0) + sum(s.dropped for s in bus.subscriptions),
            disabled=tuple(bus.faults.disabled),
            skipped=self._observer.skipped,
        )

    def close(self) -> None:
        """Publish what is pending, take every hook off, and leave the bus; with the last exporter the run is closed and readable."""
        if self._closed:
            return
        self._closed = True
        try:
            self._observer.finish()
        finally:
            self._remove_hooks()
            self.message_bus.detach(self)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this exporter is closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _name_and_module(module: Any) -> tuple[str | None, nn.Module]:
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
    return name, unwrap(module)


def _names_in(model: nn.Module | None) -> dict[int, str]:
    """Return the names modules have inside the model; a root that was given a name keeps it."""
    return {} if model is None else {id(module): name for name, module in model.named_modules() if name}


def _renamed(named: NamedModule, names: dict[int, str], own: set[str], taken: set[str]) -> NamedModule:
    name = names.get(id(named.module), named.name)
    if name in taken:
        raise ConfigError(
            f"another exporter on this bus looks at a module {name!r} already; add this one as a pair ('a name', module)"
        )
    if name in own:
        name = next(numbered for i in range(1, len(own) + 2) if (numbered := f"{name}_{i}") not in own)
    return NamedModule(name, named.module, named.aliases)


def _close_at_exit(exporter: Exporter) -> None:
    reference = weakref.ref(exporter)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    weakref.finalize(exporter, atexit.unregister, atexit.register(close)).atexit = False
