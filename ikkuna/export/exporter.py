"""What a person adds to a training script."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import nn

from ikkuna.errors import ClosedError, ConfigError, ConfigTypeError
from ikkuna.export import evaluation
from ikkuna.export.at_exit import close_at_exit
from ikkuna.export.bus.bus import MessageBus, get_default_bus
from ikkuna.export.health import Health, health_of
from ikkuna.export.hooks.hook import blind_after_fork
from ikkuna.export.hooks.install import Attachment
from ikkuna.export.model.roots import Root, Roots
from ikkuna.export.session import Session
from ikkuna.export.steps.step_tracker import TRAINING
from ikkuna.modules import ModuleFilter, NamedModule

__all__ = ["Exporter"]

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)


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
    kernels : str
        ``"compiled"``: one look at a host tensor, by a library that is made once per machine, in a second;
        ``"eager"``: numpy, which costs more, as also where there is no C++ compiler.
    compiled : str
        How a model under ``torch.compile`` is watched. ``"in_graph"``: its graph looks, and computes the same bits;
        ``"eager_on_sample"``: sampled steps run without the compiler, which is what CUDA graphs need.

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
        kernels: str = "compiled",
        compiled: str = "in_graph",
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < -1:
            raise ConfigError(f"depth must be -1 (all) or an int >= 0, got {depth!r}")
        _check_choice("kernels", kernels, "compiled", "eager")
        _check_choice("compiled", compiled, "in_graph", "eager_on_sample")
        if message_bus is not None and not isinstance(message_bus, MessageBus):
            raise ConfigTypeError(f"message_bus needs a MessageBus, got {type(message_bus).__name__}")
        self.message_bus = message_bus if message_bus is not None else get_default_bus()
        self.message_bus.error_guard.set_policy(on_error)
        self.message_bus.attach(self, log_dir)
        self._observer = Session(self.message_bus, kernels == "compiled", compiled == "in_graph")
        self._attachment = Attachment(self._observer, Roots(depth, module_filter), self._names_of_others)
        self._closed = False
        blind_after_fork(self._observer)
        close_at_exit(self)

    # -- what to look at ------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The one module that is the model; ``None`` where several were added and it was not told."""
        return self._attachment.roots.whole

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The modules looked at, under their names."""
        return self._observer.model.taps.modules

    @property
    def module_names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(named.name for named in self.modules)

    def add_modules(self, module: nn.Module | tuple[str, nn.Module], recursive: bool = True) -> None:
        """Look at a module, and with `recursive` at what is inside it.

        Names are the module's own dotted paths; those of a pair ``(name, module)`` begin with the name.

        Raises
        ------
        ConfigTypeError
            For anything else.
        ConfigError
            For a scripted module, a filter that matches nothing, or a name that is taken.
        """
        self._require_open()
        self._attachment.add(Root.of(module, recursive))

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
        self._attachment.set_model(model)

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
        self._attachment.set_loss(loss_module)

    def _names_of_others(self) -> frozenset[str]:
        return frozenset(
            name for source in self.message_bus.sources if source is not self for name in source.module_names
        )

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
        self._observer.optimizers.step_by_hand()

    def evaluate(
        self,
        batches: Iterable[Any],
        name: str | None = "testing",
        *,
        visit: Callable[[Any, Any], object] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Run the model over `batches` in evaluation mode, publish what is seen as another pass, and leave training as it was.

        Every module's training flag, buffers, all random states and the loader's generators are afterwards as found, bit for bit.

        Parameters
        ----------
        batches : iterable of pairs (inputs, labels), or of inputs alone
            Moved to the model's device.  The loss module, if one was set, is called with outputs and labels.
        name : str, optional
            The pass; subscribers listen to it with ``tag=name``.  Nobody looks at one without a name.
        visit : callable, optional
            Called with the outputs and labels of each batch.
        forward : callable, optional
            Computes outputs from the model and a batch's inputs; by default the model is called with them.

        Raises
        ------
        ConfigError
            If it is not known which module the model is.
        """
        self._require_open()
        model = self._attachment.the_model()
        look, loss = (self.paused(), None) if name is None else (self._observer.in_pass(name), self._attachment.loss)
        with self.message_bus.error_guard.recording_allowed(), look:
            evaluation.run(model, loss, batches, visit, forward)

    def epoch(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield `batches` and tell that the epoch is over after the last one; a loop that is left early has not finished it."""
        yield from batches
        self.epoch_finished()

    @property
    def steps_per_epoch(self) -> int | None:
        """How many steps an epoch has; once set, epochs end by themselves."""
        return self._observer.clock.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._observer.clock.set_steps_per_epoch(steps)

    def state_dict(self) -> dict[str, int]:
        """Return the step and the epoch, to be saved with a checkpoint."""
        return self._observer.clock.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting from a checkpoint's step; raise `ConfigError` for what is not from :meth:`state_dict`."""
        self._require_open()
        self._observer.clock.load_state_dict(state)

    def paused(self) -> AbstractContextManager[None]:
        """Look away for the time of a ``with`` block."""
        return self._observer.looking_away()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take every hook off for the time of a ``with`` block, to script a model or save it whole."""
        self._observer.finish()
        self._attachment.remove()
        try:
            yield
        finally:
            if not self._closed:
                self._attachment.install()
                self._attachment.demand_changed()

    def health(self) -> Health:
        """Return how the monitor itself is doing."""
        return health_of(self._observer)

    def demand_changed(self) -> None:
        """Take a change of what the subscribers of the bus want; the bus calls it."""
        self._attachment.demand_changed()

    def close(self) -> None:
        """Publish what is pending, take every hook off, and leave the bus; with the last exporter the run is closed and readable."""
        if self._closed:
            return
        try:
            self._observer.finish(for_good=True)
            self.message_bus.drain(wait=True)  # while a subscriber can still evaluate the model
        finally:
            self._closed = True
            self._observer.exchange.close()
            self._attachment.remove()
            self.message_bus.detach(self)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this exporter is closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_choice(name: str, value: object, first: str, second: str) -> None:
    if value not in (first, second):
        raise ConfigError(f"{name} must be {first!r} or {second!r}, got {value!r}")
