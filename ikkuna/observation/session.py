"""The open state of an exporter, composed of its parts."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from torch import Tensor, nn

from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.observation.evaluation import OtherPasses
from ikkuna.observation.hooks.context import HookContext, NativePath
from ikkuna.observation.hooks.hook import Stopwatch
from ikkuna.observation.hooks.hook_set import HookSet
from ikkuna.observation.logged_values import LoggedValues
from ikkuna.observation.model.roots import Root, Roots
from ikkuna.observation.model.watched_model import WatchedModel
from ikkuna.observation.ranks import Exchange
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.observation.step_cycle import ReplacedModules, SamplingPlans, StepCycle
from ikkuna.observation.validation import Validation
from ikkuna.store.run_directory import Continued
from ikkuna.support.failures import log, restoring
from ikkuna.support.modules import class_name


def warn_of_worker(name: str) -> None:
    """Log that a value which is logged in a worker process is not shown."""
    log.warning(
        "exporter.log(%r) in a worker process shows nothing, and so do further calls there; "
        "return the value to the process that trains, and log it there",
        name,
    )


class WorkerExporter:
    """The exporter that a process gets which is started with ``spawn`` or ``forkserver``, such as a worker of a data loader.

    It records nothing, because the model is trained in another process.

    Examples
    --------
    >>> import torch
    >>> WorkerExporter().observe("router", torch.ones(2))
    """

    def __init__(self) -> None:
        self._has_warned = False

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Show nothing; the first call logs a warning."""
        if not self._has_warned:
            self._has_warned = True
            warn_of_worker(name)

    def observe(self, name: str, tensor: Tensor) -> None:
        """Record nothing."""


P = ParamSpec("P")


def _resuming(method: "Callable[Concatenate[Session, P], None]") -> "Callable[Concatenate[Session, P], None]":
    """Make a method that the user calls abandon a step that an exception has interrupted, and note its own interruption."""

    @wraps(method)
    def call(self: "Session", /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.context.native.close()
        if self.context.is_interrupted:
            self.abandon()
            self.context.is_interrupted = False
        try:
            method(self, *args, **kwargs)
        except BaseException:
            self.context.interrupt()
            raise

    return call


class Session:
    """Everything that an exporter has while it is open, and what the user may ask it for.

    Parameters
    ----------
    bus : MessageBus
        Receives measurements and events.
    roots : Roots
        The added modules.
    taken : callable
        Returns the names of modules that other exporters of the bus observe.
    native : bool
        Whether the kernels in C++ are used, where there is a compiler.
    in_graph : bool
        Whether compiled models are measured in their graphs.

    Attributes
    ----------
    context : HookContext
        The step tracker, the parameters, the recorder and the model.
    cycle : StepCycle
        Carries out the decisions of the step tracker.
    exchange : Exchange
        Merges the measurements of all ranks.
    hooks : HookSet
        The adapters of torch's hooks.
    logged : LoggedValues
        The values that the user logs.
    plans : SamplingPlans
        Decides what is measured at each step.
    validation : Validation
        Records evaluations in the training loop.
    """

    def __init__(
        self,
        bus: MessageBus,
        roots: Roots,
        taken: Callable[[], frozenset[str]],
        native: bool = True,
        in_graph: bool = True,
    ) -> None:
        self.bus = bus
        self._taken = taken
        self._native = native
        recorder = self._new_recorder()
        native_path = NativePath(recorder)
        bus.error_guard.before_subscribers(native_path)
        self.context = context = HookContext(
            *(recorder, bus.error_guard, WatchedModel(roots), native_path), stopwatch=Stopwatch(native_path.seconds)
        )
        self.exchange = Exchange(bus, context.sites, context.model, context.parameters)
        self.logged = LoggedValues(bus)
        self.hooks = HookSet(context, in_graph)
        self.plans = SamplingPlans(bus, context, self.hooks.modules)
        replaced = ReplacedModules(context, self.hooks, taken, self.plans.demand_changed)
        parts = bus, context, self.hooks, self.plans, replaced, self.exchange
        self.validation = Validation(bus, context, self.plans.of, Recorder(bus.error_guard, native))
        self.hooks.losses.validation = self.validation.recorder
        self.cycle = StepCycle(*parts, self.logged, self.validation)
        self._passes = OtherPasses(*parts, self.cycle, self._new_recorder)
        context.apply, context.abandon = self.cycle.apply, self.abandon
        self._process = self._warned_process = os.getpid()

    def _new_recorder(self) -> Recorder:
        return Recorder(self.bus.error_guard, self._native, self._may_communicate)

    def _may_communicate(self) -> bool:
        return self.exchange.meet()

    @property
    def skipped(self) -> int:
        """Number of series that could not be read, and of updates for which there was no memory."""
        return self.hooks.optimizers.table.skipped_updates + len(self.context.recorder.unreadable)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def add(self, root: Root) -> None:
        """Observe one more root."""
        if root.module in self.context.model.roots:
            log.info("%s is observed already", class_name(root.module))
        else:
            self._observe((*self.context.model.roots.all, root))

    def set_model(self, model: nn.Module) -> None:
        """Set the module that is the whole model."""
        model = self.context.model.set_model(model)
        self._observe(self.context.model.roots.all or (Root(model),))

    def set_loss(self, loss: nn.Module) -> None:
        """Set the module that computes the loss."""
        self.context.model.loss = loss
        self.install()

    def _observe(self, roots: tuple[Root, ...]) -> None:
        """Observe what is below `roots`, and nothing else."""
        model = self.context.model
        model.observe(roots, self._taken())
        self.hooks.modules.remove(everything=True)
        self.context.parameters.track(model.modules, model.callable)
        self.install()
        self.plans.demand_changed()

    def install(self) -> None:
        """Register the hooks that stay while the exporter is open."""
        self.hooks.install(keeps=self)

    # -- steps, epochs and other passes ---------------------------------------------------------------------------

    def abandon(self) -> None:
        """Abandon the open step and what was measured of another pass, whatever state an exception has left them in."""
        self.context.tracker.abandon()
        self.validation.end(is_complete=False)
        self._passes.abandon()

    @_resuming
    def finish_epoch(self) -> None:
        """Mark the end of an epoch."""
        self.cycle.apply(self.context.tracker.epoch_ends())

    @_resuming
    def step_by_hand(self) -> None:
        """Mark the end of a step that no optimizer makes."""
        self.hooks.optimizers.step_by_hand()

    @_resuming
    def begin_pass(self, name: str) -> None:
        """Record another pass over data under its own name, until another one begins; an open step waits."""
        self.validation.end()
        self._passes.begin(name)

    def run_in_pass(self, name: str | None, body: Callable[[], None]) -> None:
        """Record a function as a pass, then return to the pass before; without a name, suspend recording.

        A pass that an exception ends is not published.
        """
        if name is None:
            self._run_paused(body)
            return
        before = self.context.tracker.pass_name
        try:
            self.begin_pass(name)
            body()
            self.begin_pass(before)
        except BaseException:
            if self.context.tracker.pass_name != before:
                self._passes.end(is_complete=False)
            self.begin_pass(before)
            raise

    def _run_paused(self, body: Callable[[], None]) -> None:
        context, before = self.context, self.context.is_paused

        def run() -> None:
            context.is_paused = True
            body()

        restoring(run, lambda: setattr(context, "is_paused", before))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend recording inside the body, and restore the former setting afterwards."""
        before = self.context.is_paused
        try:
            self.context.is_paused = True
            yield
        finally:
            self.context.is_paused = before

    @_resuming
    def finish(self, for_good: bool = False, has_ended: bool = True) -> None:
        """Close whatever is open; with `has_ended`, a training that has not begun is reported."""
        if for_good:
            self.exchange.prepare_close()
        self._passes.end()
        self.cycle.apply(self.context.tracker.finish())
        self.validation.end()
        if for_good:
            self.logged.step_ends()
            self.hooks.forward.report_missing_steps()
            if has_ended:
                self.hooks.forward.report_no_batch()
            self.hooks.optimizers.finish()

    # -- values and counters --------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, step: int | None) -> None:
        """Keep a value of the user's own until its step ends."""
        if (process := os.getpid()) != self._process:
            if process != self._warned_process:
                self._warned_process = process
                warn_of_worker(name)
            return
        tracker = self.context.tracker
        self.logged.add(name, value, tracker.pass_stamp(tracker.pass_name), tracker.counters.next.global_step - 1, step)

    def load_counters(self, state: dict[str, int], continued: Continued | None = None) -> None:
        """Continue to count from a checkpoint, which may be of an earlier step, and continue a stored run."""
        counters = self.context.tracker.counters
        before = counters.next.global_step
        counters.load_state_dict(state)
        if continued is not None:
            self.bus.continued = continued
        elif self.bus.continued is not None and self.bus.run is None:
            self.bus.continued = replace(self.bus.continued, step=counters.next.global_step)
        self.logged.rewind(counters.next.global_step)
        if counters.next.global_step < before and self.bus.run is not None:
            self.bus.drain(wait=True)
            self.bus.run.rewind(counters.next.global_step)
