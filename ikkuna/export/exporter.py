"""The exporter, which is added to a training script."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from ikkuna.diagnosis import Findings
from ikkuna.diagnosis.recorded_preflight import RecordedPreflight
from ikkuna.errors import ConfigError, ConfigTypeError, is_integer
from ikkuna.export.attachment import Attachment, Health, release_unreachable
from ikkuna.flight_recorder.options import RecorderOptions
from ikkuna.flight_recorder.recorder import FlightRecorder
from ikkuna.metrics.bus.bus import MessageBus, get_default_bus
from ikkuna.metrics.live_rules import RuleSelection, register_rules
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.observation import checkpoint
from ikkuna.observation.hooks.first_steps import FirstSteps
from ikkuna.observation.model.roots import Root, Roots, parted
from ikkuna.observation.model.watched_model import observable_loss
from ikkuna.observation.session import WorkerExporter
from ikkuna.store.run_directory import RunSettings
from ikkuna.support.modules import ModuleFilter, NamedModule

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)


class Exporter:
    """Observes modules while they train, and publishes their tensors to subscribers.

    It works until it is closed, or until the model is deleted, also if no variable refers to the exporter.

    Parameters
    ----------
    depth : int
        -1 to observe the leaves and all modules that own parameters; otherwise the depth to observe (that of the root is 0).
    module_filter : list of type, or callable, optional
        The classes of the modules to observe, or a function of a `NamedModule`; by default all.
    message_bus : MessageBus, optional
        The bus to publish on; by default `get_default_bus`.
    log_dir : path, optional
        The directory of the runs, each in a sub-directory; by default ``run``.
    run_name : str, optional
        The name of the run's directory; by default ``run0001`` and so on.  If it is taken, ``_2`` and so on is appended.
    config : dict or object, optional
        Hyper-parameters, stored with the run; those that are no numbers or strings are stored as their ``repr``.
    resume : bool or 'auto'
        Whether the run of a checkpoint is continued in its directory, see :meth:`load_state_dict`.
        With ``"auto"`` a new run begins if no state is loaded, or if the directory of its run is gone.
        With ``True`` the second is an error, and without a state the latest run continues after its last step.
    verbosity : int
        0 to write no line about the directory of the run.
    on_error : {'disable', 'log', 'raise'}
        Handling of errors of subscribers after set-up: disable the subscriber after ten failures in a row, only log them,
        or raise them, for tests and authors of plugins.
    kernels : {'native', 'eager'}
        ``"native"`` measures tensors in host memory by a C++ library that is compiled once per machine, in a second;
        ``"eager"`` measures them by numpy, which is slower, and is also used if there is no C++ compiler.
    compiled : {'in_graph', 'eager_on_sample'}
        How a model under ``torch.compile`` is observed.  ``"in_graph"`` measures in the compiled graph, which computes the same bits;
        ``"eager_on_sample"`` runs sampled steps without the compiler, as CUDA graphs need.

    Raises
    ------
    ConfigError, ConfigTypeError
        If an argument is invalid.
    LogDirError
        If `log_dir` cannot be written, or if ``resume=True`` and it contains no run.

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
        run_name: str | None = None,
        config: Any = None,
        resume: bool | str = False,
        verbosity: int = 1,
        on_error: str = "disable",
        kernels: str = "native",
        compiled: str = "in_graph",
    ) -> None:
        if not is_integer(depth, -1):
            raise ConfigError(f"depth must be -1 (all) or an int >= 0, got {depth!r}")
        _check_choice("kernels", kernels, "native", "eager")
        _check_choice("compiled", compiled, "in_graph", "eager_on_sample")
        if message_bus is not None and not isinstance(message_bus, MessageBus):
            raise ConfigTypeError(f"message_bus needs a MessageBus, got {type(message_bus).__name__}")
        self.message_bus = message_bus if message_bus is not None else get_default_bus()
        release_unreachable()
        self.message_bus.error_guard.set_policy(on_error)
        settings = RunSettings.checked(log_dir, run_name, config, resume, verbosity)
        roots = Roots(depth, module_filter)
        self._attachment = Attachment(
            self, self.message_bus, roots, kernels == "native", compiled == "in_graph", settings
        )
        self._session = self._attachment.session

    # -- what to observe -----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The module that is the whole model; ``None`` if several modules were added and none was set."""
        return self._attachment.model

    @property
    def modules(self) -> tuple[NamedModule, ...]:
        """The observed modules with their names."""
        return self._attachment.modules

    @property
    def module_names(self) -> frozenset[str]:
        """The names of the observed modules."""
        return self._attachment.module_names

    def add_modules(self, module: nn.Module | tuple[str, nn.Module], recursive: bool = True) -> None:
        """Observe a module, and with `recursive` the modules inside it.

        Names are the module's own dotted paths; the names of a pair ``(name, module)`` begin with its name.

        Raises
        ------
        ConfigTypeError
            If `module` is neither a module nor such a pair.
        ConfigError
            If the module is scripted, if the filter matches nothing, or if a name is taken.
        """
        self._attachment.require_open()
        for root in parted(Root.of(module, recursive)):
            self._attachment.make_room(root)
            self._session.add(root)
        checkpoint.check_stored_model(self._session)

    def __call__(self, module: M, recursive: bool = True) -> M:
        """Observe a module and return it, for use in a constructor."""
        self.add_modules(module, recursive)
        return module

    def set_model(self, model: nn.Module) -> None:
        """Set the module that is the whole model: its call is the forward, and modules added before get their names in it.

        Raises
        ------
        ConfigTypeError
            If `model` is not a module.
        ConfigError
            If another model was set before.
        """
        self._attachment.require_open()
        if not isinstance(model, nn.Module):
            raise ConfigTypeError(f"set_model() needs a torch.nn.Module, got {type(model).__name__}")
        self._session.set_model(model)
        checkpoint.check_stored_model(self._session)

    def set_loss(self, loss: nn.Module | Callable[..., Any]) -> nn.Module:
        """Set the module or function that computes the loss, for the kinds ``loss``, ``input_labels`` and ``network_output``.

        Without it the loss of training is the scalar on which ``backward()`` is called, and the labels are known only for
        models that take ``labels`` and return a ``loss``.

        Parameters
        ----------
        loss : nn.Module or callable
            Called with outputs and labels.

        Returns
        -------
        nn.Module
            The module itself, or one that calls the function.
            A function cannot be observed: call this module in the training loop in its place, or labels stay unknown.

        Raises
        ------
        ConfigTypeError
            If `loss` is neither a module nor a function.

        Examples
        --------
        >>> import torch
        >>> from ikkuna.export.messages import MessageBus
        >>> exporter = Exporter(message_bus=MessageBus())
        >>> loss = exporter.set_loss(torch.nn.functional.cross_entropy)
        >>> loss(torch.zeros(1, 2), torch.tensor([0]))
        tensor(0.6931)
        >>> exporter.close()
        """
        self._attachment.require_open()
        module = observable_loss(loss)
        self._session.set_loss(module)
        return module

    @property
    def loss(self) -> nn.Module | None:
        """The module set with :meth:`set_loss`, or one that calls the function set; ``None`` without one."""
        return self._session.context.model.loss

    def apply_rules(self, rules: RuleSelection = "default", *, preflight: bool = False, **options: Any) -> None:
        """Apply rules after each step, which name mistakes of the training; call it after all subscribers are registered.

        Parameters
        ----------
        rules : str, Rule, or iterable of them
            ``"default"``, ``"all"``, names of rules, or `ikkuna.diagnosis.Rule` objects.
        preflight : bool
            Whether the first call of the loss that was set is checked at the end of step 0, see `ikkuna.watch`.
        **options : Any
            ``every``, ``later``, ``loss_every``, ``on_finding``, ``stop``, ``mute`` and ``backend``,
            see `ikkuna.metrics.live_rules.register_rules`.

        Raises
        ------
        ConfigError, PluginError
            If a rule is unknown, if an argument is invalid, or if rules are applied already.
        """
        self._attachment.require_open()
        if self._attachment.rules is not None:
            raise ConfigError("rules are applied already; pass all of them in one call of apply_rules()")
        with self.message_bus.registering():
            self._attachment.rules = register_rules(self.message_bus, rules, **options)
        self._attachment.hook_process()
        context, rules_applied = self._session.context, self._attachment.rules
        context.found = lambda finding: rules_applied.add_finding(finding, context.tracker.counters.stamp())
        if preflight:
            checks, losses = RecordedPreflight(self.model), self._session.hooks.losses
            self._attachment.rules.preflight = losses.preflight = checks
            losses.objective = checks.objective
        optimizers = self._session.hooks.optimizers
        optimizers.first_steps = FirstSteps(context.found)
        optimizers.untrained.names_unowned = "unowned_parameters" not in self._attachment.rules.judge.kinds
        self._connect_recorder()

    def record_steps(self, options: RecorderOptions | None = None) -> None:
        """Keep the last sampled steps in memory, and write them to the directory of the run when something goes wrong.

        A dump is written after a finding of the rules, a number that becomes NaN or infinite, a loss that jumps,
        an exception that ends the process or leaves the exporter's ``with`` block, and the signals in `options`.
        For a few steps after a dump everything is measured.  Training does not wait for the disk.

        Parameters
        ----------
        options : RecorderOptions, optional
            The settings.

        Raises
        ------
        ConfigError
            If steps are recorded already, or if a signal cannot be handled.
        """
        self._attachment.require_open()
        if self._attachment.recorder is not None:
            raise ConfigError("steps are recorded already; pass all settings in one call of record_steps()")
        if options is not None and not isinstance(options, RecorderOptions):
            raise ConfigTypeError(f"record_steps() needs RecorderOptions, got {type(options).__name__}")
        options = options or RecorderOptions()
        self._attachment.hook_process(options.signals)
        self._attachment.recorder = FlightRecorder(self._session.context, self.message_bus, options)
        self._connect_recorder()

    def _connect_recorder(self) -> None:
        if (recorder := self._attachment.recorder) is not None and self._attachment.rules is not None:
            recorder.judge = self._attachment.rules.judge
            self._attachment.rules.actions.append(recorder.action())

    def rows(self, ids: Any) -> None:
        """Name the rows of the batch that the model is called with next, so that a dump names them.

        Without ids, a dump contains a hash of each row, which ``ikkuna replay --find`` looks up in the data set.
        If steps are not recorded, this does nothing.

        Parameters
        ----------
        ids : sequence, array or Tensor
            One number or text for each row, such as the indices of the data set.

        Raises
        ------
        ConfigTypeError
            If `ids` is not such a collection.
        """
        is_collection = hasattr(ids, "__len__") and hasattr(ids, "__getitem__") and getattr(ids, "ndim", 1) != 0
        if isinstance(ids, str | bytes | Mapping) or not is_collection:
            raise ConfigTypeError(f"rows() needs a list, an array or a tensor of ids, got {type(ids).__name__}")
        if (recorder := self._attachment.recorder) is not None:
            recorder.set_ids(ids)

    def dump(self, reason: str = "asked for", timeout: float = 10.0) -> Path | None:
        """Write the last sampled steps to the disk, and return the directory.

        Returns
        -------
        Path or None
            ``None`` if it was not written within `timeout` seconds; the log says why.

        Raises
        ------
        ConfigError
            If steps are not recorded, see :meth:`record_steps`.
        """
        self._attachment.require_open()
        if (recorder := self._attachment.recorder) is None:
            raise ConfigError("no step is recorded; call record_steps() before training")
        return recorder.dump(reason, timeout)

    @property
    def dumps(self) -> tuple[Path, ...]:
        """The directories of the dumps that are on the disk, also after :meth:`close`."""
        recorder = self._attachment.recorder
        return recorder.dumps if recorder is not None else ()

    @property
    def findings(self) -> Findings:
        """The findings of the rules so far, also after :meth:`close`; empty without rules."""
        return self._attachment.rules.findings if self._attachment.rules is not None else Findings()

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run, also after :meth:`close`; ``None`` without a stored value, as on other ranks."""
        return self._attachment.run_directory

    # -- while training -------------------------------------------------------------------------------------------

    def epoch_finished(self) -> None:
        """Mark the end of an epoch; the next step begins another one."""
        self._attachment.require_open()
        self._session.finish_epoch()

    def train(self) -> None:
        """Return to training after :meth:`test`, and publish the measurements of the other pass."""
        self._session.begin_pass(TRAINING)

    def test(self, name: str = "testing") -> None:
        """Record from now on as another pass, for subscribers with ``tag=name``; the model's training mode stays as it is."""
        self._attachment.require_open()
        self._session.begin_pass(name)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Show a value of the user's own beside the metrics, as the series ``logged/{name}`` of the same run.

        A value belongs to the open step, or to the last one; it is stored when the step ends, or the next one.
        Subscribers of the kind ``logged`` with ``derived = True`` receive numbers; the name is ``message.path``.
        The backends are those of the registered subscribers, and TensorBoard if there are none.
        Each rank logs for itself, and rank 0 writes.  Nothing waits for a device, and any thread may call this method;
        in a child process, such as a worker of a data loader, it logs one warning and shows nothing.

        Parameters
        ----------
        name : str
            Any name; ``/`` groups names.
        value : Any
            A number or a tensor or array of one element (NaN is shown as NaN); a tensor or array of several elements,
            shown as a histogram; 8-bit pixels (height, width, channel), an image of Pillow or a figure of matplotlib, shown as a picture;
            a histogram or a matrix; or a string, shown as Markdown.  A tensor is copied, and stays on its device until the step ends.
            A second value of the same name and step replaces the first; if the first is stored already, because its step has
            ended, the second belongs to the next step.
        step : int, optional
            The step of the value.  A later step waits until the training reaches it.
            A value of an earlier one than the last that has ended, and a second value of the last one, are dropped, counted in
            ``health().dropped``, and logged once.

        Raises
        ------
        ConfigError, ConfigTypeError
            If `name`, `value` or `step` is invalid.
        ClosedError
            After :meth:`close`.

        Examples
        --------
        >>> from ikkuna.export.messages import MessageBus
        >>> from ikkuna.export.subscriber import CallbackSubscriber
        >>> with Exporter(message_bus=MessageBus()) as exporter:
        ...     seen = CallbackSubscriber("logged", lambda message: print(message.path, message.data), backend="null")
        ...     handle = exporter.message_bus.register_subscriber(seen)
        ...     exporter.log("reward", 1.5)
        reward 1.5
        """
        self._attachment.require_open()
        if step is not None and not is_integer(step, 0):
            raise ConfigError(f"log({name!r}) needs step=None or an int >= 0, got {step!r}")
        self._session.log(name, value, step)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if get_spawning_popen() is None:
            raise ConfigTypeError("an exporter cannot be copied or pickled; store exporter.state_dict() instead")
        return WorkerExporter, ()  # for the process that is being started

    def observe(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that no module returns, for this exporter alone; see `ikkuna.observe`.

        After :meth:`close` nothing is recorded, and nothing is raised.
        """
        if self._session.hooks.observed.is_wanted:
            self._session.hooks.observed.hook(name, tensor)

    def step(self) -> None:
        """Mark the end of a step that no optimizer of torch.optim makes."""
        self._attachment.require_open()
        self._session.step_by_hand()

    def evaluate(
        self,
        batches: Iterable[Any],
        name: str | None = "testing",
        *,
        visit: Callable[[Any, Any], object] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
    ) -> None:
        """Run the model over `batches` in evaluation mode, and publish the measurements as another pass.

        Training flags, buffers, all random states and the generators of the data loader are restored afterwards, bit for bit.

        Parameters
        ----------
        batches : iterable
            Pairs ``(inputs, labels)``, or inputs alone, which are moved to the model's device.
            The loss module, if one was set, is called with outputs and labels.
        name : str, optional
            Name of the pass, for subscribers with ``tag=name``.  A pass without a name is not recorded.
        visit : callable, optional
            Called with the outputs and labels of each batch.
        forward : callable, optional
            Computes outputs from the model and a batch's inputs; by default the model is called with them.

        Raises
        ------
        ConfigError
            If several modules were added and none was set as the model.
        """
        self._attachment.evaluate(batches, name, visit=visit, forward=forward)

    def epoch(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield `batches`, and mark the end of the epoch after the last one; a loop that is left early does not end the epoch."""
        yield from batches
        self.epoch_finished()

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps after which an epoch ends by itself; ``None`` if it does not."""
        return self._session.context.tracker.counters.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        self._session.context.tracker.counters.set_steps_per_epoch(steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the monitor, to be saved with a checkpoint and read by ``torch.load``.

        It contains the step and the epoch, the identity of the run, names and shapes of the parameters,
        and what subscribers keep over several steps: running means, windows, and reference tensors such as the initial weights.
        The values of all finished steps are written before.  Call it between two steps: measurements of an open step are
        left out, because a checkpoint holds no gradients of its micro-batches.
        """
        return checkpoint.state_of(self._session)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        Subscribers that are registered later receive their states then.
        With ``resume=True`` or ``"auto"`` the run continues in its directory: values of the present step and later ones are
        replaced.

        Raises
        ------
        ConfigError
            If `state` is not from :meth:`state_dict`, or if it belongs to another model.
        LogDirError
            With ``resume=True``, if the directory of its run is gone.
        """
        self._attachment.require_open()
        checkpoint.load_state(self._session, state)

    def pause(self) -> None:
        """Sample nothing from the next step on until :meth:`resume`; steps and epochs are still counted.

        With several exporters on a bus, this applies to all of them.  On several ranks, call it on all of them after the same step.
        """
        self._attachment.require_open()
        self._session.plans.change_sampling(paused=True)

    def resume(self) -> None:
        """Sample again from the next step on; without :meth:`pause` nothing changes."""
        self._attachment.require_open()
        self._session.plans.change_sampling(paused=False)

    def sample_every(self, steps: int | None) -> None:
        """Let all subscribers sample each `steps`-th step from the next step on, such as each step after a spike.

        Parameters
        ----------
        steps : int or None
            ``None`` for the steps that each subscriber was registered with.

        Raises
        ------
        ConfigError
            If `steps` is neither ``None`` nor a positive int.
        """
        self._attachment.require_open()
        if steps is not None and not is_integer(steps, 1):
            raise ConfigError(f"sample_every() needs an int >= 1 or None, got {steps!r}")
        self._session.plans.change_sampling(every=steps)

    def paused(self) -> AbstractContextManager[None]:
        """Suspend recording inside a ``with`` block."""
        return self._session.paused()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Remove every hook inside a ``with`` block, to script a model or to save it whole."""
        self._session.finish()
        self._session.hooks.uninstall()
        try:
            yield
        finally:
            if not self._attachment.is_closed:
                self._session.install()
                self._session.plans.demand_changed()

    def release_memory(self) -> None:
        """Free the memory that is kept for copies of weights between sampled steps; the next sampled step allocates it again."""
        self._session.hooks.optimizers.table.memory.release()

    def health(self) -> Health:
        """Return the state of the monitor itself; after :meth:`close` that at the end."""
        return self._attachment.health()

    @property
    def is_closed(self) -> bool:
        """Whether the exporter was closed: by :meth:`close`, or by a second `ikkuna.watch` of its model."""
        return self._attachment.is_closed

    def close(self) -> None:
        """Publish what is pending, and remove every hook; with the last exporter of the bus the run is closed and readable.

        It waits at most 10 seconds until all pictures are drawn with the last values, and then 2 seconds until all values are stored.
        """
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._attachment.process_fails(error)
        self._attachment.close(is_given_up=error is not None)


def _check_choice(name: str, value: object, first: str, second: str) -> None:
    if value not in (first, second):
        raise ConfigError(f"{name} must be {first!r} or {second!r}, got {value!r}")
