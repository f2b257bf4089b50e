"""Composes the parts of an exporter, and carries out the decisions of the step tracker."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import nn

from ikkuna.distributed.world import World
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.hooks.backward import BackwardHooks
from ikkuna.export.hooks.compiled import CompiledHooks
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.copies import HookFreeCopies
from ikkuna.export.hooks.fast_path import FastPathHooks
from ikkuna.export.hooks.forward import ForwardHooks
from ikkuna.export.hooks.install import PermanentHooks
from ikkuna.export.hooks.layer_gradients import LayerGradientHooks
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.export.hooks.micro_gradients import MicroGradientHooks
from ikkuna.export.hooks.modules import ModuleHooks
from ikkuna.export.hooks.native_path import NativePath
from ikkuna.export.hooks.observed import ObservedHooks
from ikkuna.export.hooks.optimizers import OptimizerHooks
from ikkuna.export.hooks.unclipped_gradients import UnclippedGradientHooks
from ikkuna.export.logged_values import LoggedValues
from ikkuna.export.messages.kinds import PARAMETER_KINDS
from ikkuna.export.messages.message import NetworkMessage
from ikkuna.export.messages.stamp import TRAINING, Stamp
from ikkuna.export.model.roots import Root, Roots
from ikkuna.export.model.watched_model import WatchedModel
from ikkuna.export.ranks.exchange import Exchange
from ikkuna.export.rows.delivery import Event, Finished, Unsampled
from ikkuna.export.rows.plan import Demand, Plan
from ikkuna.export.rows.recorder import Recorder
from ikkuna.export.steps.decisions import Abandoned, Closed, Decision, EpochFinished, Merged, Opened, Restarted
from ikkuna.export.steps.forward import MICRO_PART
from ikkuna.export.steps.step_tracker import State
from ikkuna.export.steps.stopwatch import Stopwatch
from ikkuna.export.worker_exporter import warn_of_worker
from ikkuna.logger import log
from ikkuna.modules import class_name
from ikkuna.numerics.statistics import closure
from ikkuna.numerics.statistics.device import warm_up
from ikkuna.undisturbed import restoring
from ikkuna.visualization.files.control_file import CONTROL_FILE
from ikkuna.visualization.run_settings import Continued

__all__ = ["Session"]


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
            self.context.is_interrupted = True
            raise

    return call


class Session:
    """Everything that an exporter has while it is open.

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
    exchange : Exchange
        Merges the measurements of all ranks.
    logged : LoggedValues
        The values that the user logs.
    observed : ObservedHooks
        Records what the model passes to ``observe``.
    optimizers : OptimizerHooks
        Observes parameters around the steps of optimizers.
    steps : int
        Number of training steps.
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
        recorder = Recorder(bus.error_guard, native, self._may_communicate)
        native_path = NativePath(recorder)
        bus.error_guard.before_subscribers(native_path)
        self.context = context = HookContext(
            *(recorder, bus.error_guard, self.apply, self.abandon, WatchedModel(roots), native_path),
            stopwatch=Stopwatch(native_path.seconds),
        )
        self.exchange = Exchange(bus, context.sites, context.model)
        self._process = self._warned_process = os.getpid()
        self.logged = LoggedValues(bus)
        self._losses = LossHooks(context)
        self.optimizers = OptimizerHooks(context, self._losses)
        self._backward = BackwardHooks(context, self._losses)
        self._gradients = LayerGradientHooks(context, self._backward)
        self._micro_gradients = MicroGradientHooks(context)
        self._unclipped = UnclippedGradientHooks(context)
        self._backward.ended.append(self._unclipped.backward_ended)
        self._forward = ForwardHooks(context, self._backward, self._gradients, self._losses)
        self._fast_paths = FastPathHooks(context)
        self.observed = ObservedHooks(context, self._forward)
        self._modules = ModuleHooks(
            *(context, self._forward, self._fast_paths, self.observed, self._gradients), in_graph
        )
        self._compiled = CompiledHooks(context, self._forward, self._backward, self._modules)
        context.sites.set_receiver(self._compiled)
        self._permanent = PermanentHooks(
            self._forward, self._losses, self.optimizers, self._fast_paths, self._modules.switch
        )
        self._copies = HookFreeCopies()
        self._taken = taken
        self._native = native
        self._demand = Demand()
        self._training = recorder
        self._warned_of_loss = self._warned_of_change = False
        self.steps = 0

    def _may_communicate(self) -> bool:
        return self.exchange.meet()

    @property
    def skipped(self) -> int:
        """Number of series that could not be read, and of updates for which there was no memory."""
        return self.optimizers.records.skipped_updates + len(self.context.recorder.unreadable)

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
        self._modules.remove(everything=True)
        self.context.parameters.track(model.modules, model.callable)
        self.install()
        self.demand_changed()

    def _follow(self, inside_step: bool = False) -> None:
        """Observe the modules and parameters that the user has put in place of others since they were added.

        The hooks of a compiled model cannot change inside a step, because its graph runs then.
        """
        context = self.context
        try:
            if context.parameters.modules_have_changed() and not (inside_step and context.model.is_compiled):
                self._follow_modules()
            else:
                context.parameters.refresh()
        except Exception as error:  # of the user's filter of modules, for example
            context.error_guard.report_internal("finding the modules that were replaced", error)

    def _follow_modules(self) -> None:
        context, model = self.context, self.context.model
        try:
            change = model.follow(self._taken())
        finally:
            context.parameters.track(model.modules, model.callable)
        if not change.names:  # a wrapper was put around a module
            return
        self._modules.forget(change.names)
        self._include_copies()
        self.demand_changed()
        if not self._warned_of_change:
            self._warned_of_change = True
            log.warning("the model has changed since it was added: %s", change)

    def demand_changed(self) -> None:
        """Handle a change of what subscribers want."""
        wishes = Plan(tuple(r for r in self.bus.registered if not r.disabled))
        if wishes.takes_data:
            tensors = (named.parameter for named in self.context.parameters.all)
            parameters = {(x.device, x.dtype) for x in tensors if not x.is_cpu}
            warm_up(parameters, {closure(r.subscriber.fields) for r in wishes.subscriptions if r.subscriber.fields})
        if self._modules.prepare(wishes, self._next_plan()):
            log.warning("torch.compiler.reset(): the model was compiled before all that is wanted of it now was known")
            torch.compiler.reset()

    def install(self) -> None:
        """Register the hooks that stay while the exporter is open."""
        model = self.context.model
        self._permanent.install(model.callable, model.loss, keeps=self)
        self._include_copies()

    def _include_copies(self) -> None:
        """Keep the hooks out of copies of all modules that may have some."""
        model = self.context.model
        loss = () if model.loss is None else (model.loss,)
        self._copies.include((*model.callable, *loss, *(named.module for named in model.modules)))

    def uninstall(self) -> None:
        """Remove the hooks that stay while the exporter is open."""
        self._permanent.remove()
        self.observed.set_wanted(False)
        self._copies.remove()

    # -- steps ----------------------------------------------------------------------------------------------------

    def apply(self, decisions: tuple[Decision, ...]) -> None:
        """Carry out decisions of the step tracker, in order."""
        for decision in decisions:
            match decision:
                case Opened():
                    self._open(decision)
                case Merged(source, target):
                    if (rows := self.context.recorder.rows) is not None:
                        rows.merge_part(source, target)
                case Restarted(parts, parameters):
                    self._restart(parts, parameters)
                case Closed():
                    self._close(decision)
                case Abandoned():
                    self._end_hooks()
                    self.optimizers.step_ended()
                    self.context.recorder.close()
                case EpochFinished(stamp):
                    self._finish_epoch(stamp)

    def _open(self, opened: Opened) -> None:
        stamp, recorder = opened.stamp, self.context.recorder
        if opened.starts_epoch:
            self.bus.queue.append(NetworkMessage(stamp, "epoch_started"))
        if self.bus.is_wanted("batch_started"):
            self.bus.queue.append(NetworkMessage(stamp, "batch_started"))
        if not opened.is_carried or recorder.rows is None:
            if recorder.rows is not None:  # an exception has kept them from being closed
                recorder.close()
            self._record(stamp)
        if (observer := self.context.observer) is not None:
            observer.step_opened(stamp, recorder.plan)
        if recorder.plan.takes_data:
            self._follow(inside_step=True)
        self._micro_gradients.step_opened()
        self.optimizers.step_opened()
        self._install_modules()

    def _record(self, stamp: Stamp) -> None:
        context = self.context
        self.exchange.step_opened(stamp)
        context.model.find_stages()
        context.replicas = self.exchange.replicas
        plan = self._demand.plan(self.bus.registered, stamp)
        context.recorder.open(stamp, plan)

    def _install_modules(self) -> None:
        plan = self.context.recorder.plan
        if not self.context.model.is_compiled:
            self._modules.set_sampled(plan)
            self._modules.install(plan)

    def _restart(self, parts: tuple[int, ...], parameters: bool) -> None:
        if (rows := self.context.recorder.rows) is None:
            return
        for part in parts:
            rows.drop_part(part)
        if MICRO_PART in parts:
            rows.renew_stamp()
        if parameters:
            rows.drop(frozenset((*PARAMETER_KINDS, *self.context.recorder.plan.states)))
            self.optimizers.step_ended()

    def _close(self, closed: Closed) -> None:
        recorder, stamp = self.context.recorder, closed.stamp
        if not closed.skipped:
            self.optimizers.before_close()
            self.steps += 1
        self._end_hooks()
        lap, rates = self.context.stopwatch.lap(), self.optimizers.rates
        self.optimizers.step_ended()
        self.logged.step_ends(stamp.global_step)
        step = None
        if recorder.rows is not None:
            self._warn_of_missing_loss()
            finished = NetworkMessage(stamp, "batch_finished", self._report(rates, lap))
            recorder.rows.rates = dict(rates)
            self.bus.queue.append(step := self._finished(finished, closed))
        else:
            recorder.close(carried=closed.carried)
            if self.context.observer is not None and not closed.skipped:
                self.context.observer.step_passed(stamp)
            self.exchange.meet()
            if len(self.bus.queue):
                self.bus.queue.append(Unsampled(stamp))
            else:
                self.bus.commit(stamp.global_step)
        if not closed.carried:
            self._prepare_next()
        self._follow_control_file()
        if step is not None and self.bus.calls_model and not self.exchange.is_shared:
            step.evaluate(self.bus)
        self.bus.drain(wait=self.exchange.must_wait(stamp))
        self.context.stopwatch.step_ended(0.0 if self.bus.run is None else self.bus.run.drawing_seconds)

    def _finished(self, finished: NetworkMessage, closed: Closed) -> Finished:
        recorder = self.context.recorder
        plan, rows = recorder.plan, recorder.close(closed.parts, closed.carried)
        assert rows is not None
        rows.skipped = finished.skipped = rows.skipped or closed.skipped
        self.exchange.take(rows, plan)
        return Finished(rows, finished, self.context.observer)

    def _end_hooks(self) -> None:
        self._backward.step_ended()
        self._gradients.step_ended()
        self._micro_gradients.step_ended()
        self._losses.step_ended()
        self._compiled.step_ended()

    def _prepare_next(self) -> None:
        if self._modules.is_found_compiled():
            self.demand_changed()
        plan = self._next_plan()
        if plan.takes_data and self.context.model.is_compiled:
            self._follow()
        self._modules.keep_for(plan)
        self._modules.set_sampled(plan)
        if self.context.tracker.is_rootless:
            self._modules.install(plan)  # no call of a root will announce the next step

    def _next_plan(self) -> Plan:
        return self._demand.plan(self.bus.registered, self.context.tracker.stamp)

    def _report(self, rates: dict[str, Any], lap: tuple[float, float] | None) -> dict[str, Any]:
        """Return the data of ``batch_finished``."""
        report: dict[str, Any] = {
            "learning_rates": rates,
            "unowned": self.context.parameters.known_owners().unowned,
        }
        if lap is not None:
            report["seconds"], report["own_seconds"] = lap
        return report

    def _warn_of_missing_loss(self) -> None:
        """Warn once that a subscriber wants the loss or the labels, and they are unknown."""
        plan = self.context.recorder.plan
        # the first step only shows that a model is never called as a whole; one in evaluation mode seems to be such for two steps
        whole = self.context.model.roots.whole
        first = 1 if whole is None or whole.training else 2
        is_first = self.context.tracker.is_rootless and self.steps <= first
        if self._warned_of_loss or is_first or not self.context.model.sees_loss:
            return
        if not self._losses.has_loss and (plan.together or "loss" in plan.kinds):
            missing = "the loss"
        elif not self._losses.has_labels and (plan.together or "input_labels" in plan.kinds):
            missing = "the labels"
        else:
            return
        self._warned_of_loss = True
        log.warning(
            "a subscriber wants %s, which cannot be seen; set the module or function that computes the loss, and call what "
            "set_loss() returns: loss = exporter.set_loss(loss)",
            missing,
        )

    def abandon(self) -> None:
        """Abandon the open step and what was measured of another pass, whatever state an exception has left them in."""
        context = self.context
        context.tracker.abandon()
        for recorder in (self._training, context.recorder):
            recorder.close()
        self._end_hooks()
        self.optimizers.step_ended()
        self._modules.remove()
        self._modules.remove_lost()
        if context.tracker.pass_name == TRAINING:
            context.recorder = self._training
            self._prepare_next()
        else:
            self._open_pass()

    def load_counters(self, state: dict[str, int], continued: Continued | None = None) -> None:
        """Continue to count from a checkpoint, which may be of an earlier step, and continue a stored run."""
        counters = self.context.tracker.counters
        before = counters.global_step
        counters.load_state_dict(state)
        if continued is not None:
            self.bus.continued = continued
        elif self.bus.continued is not None and self.bus.run is None:
            self.bus.continued = replace(self.bus.continued, step=counters.global_step)
        self.logged.rewind(counters.global_step)
        if counters.global_step < before and self.bus.run is not None:
            self.bus.drain(wait=True)
            self.bus.run.rewind(counters.global_step)

    @_resuming
    def finish_epoch(self) -> None:
        """Mark the end of an epoch."""
        self.apply(self.context.tracker.epoch_ends())

    @_resuming
    def step_by_hand(self) -> None:
        """Mark the end of a step that no optimizer makes."""
        self.optimizers.step_by_hand()

    def _finish_epoch(self, stamp: Stamp) -> None:
        self.logged.step_ends(stamp.global_step)
        self.bus.queue.append(event := Event(NetworkMessage(stamp, "epoch_finished")))
        self._follow()
        if self.bus.calls_model and not self.exchange.is_shared:
            event.evaluate(self.bus)
        self.bus.drain(wait=self.exchange.must_wait(None))

    # -- other passes ---------------------------------------------------------------------------------------------

    @_resuming
    def begin_pass(self, name: str) -> None:
        """Record another pass over data under its own name, until `end_pass`; an open step waits."""
        context = self.context
        if name == context.tracker.pass_name:
            return
        self.end_pass()
        if name == TRAINING:
            return
        self.apply(context.tracker.pass_begins(name))
        self._modules.remove()
        self._open_pass()

    def _open_pass(self) -> None:
        context = self.context
        context.recorder = Recorder(self.bus.error_guard, self._native, self._may_communicate)
        self._record(context.tracker.pass_stamp(context.tracker.pass_name))
        self._follow()
        self._install_modules()
        self._modules.set_sampled_pass(context.recorder.plan)

    def end_pass(self, is_complete: bool = True) -> None:
        """Return to training, and publish the measurements of the other pass if they are complete."""
        context, recorder = self.context, self.context.recorder
        if context.tracker.pass_name == TRAINING:
            return
        self._gradients.step_ended()
        self._modules.remove()
        if recorder is not self._training:
            plan, rows = recorder.plan, recorder.close()
            self._training.unreadable |= recorder.unreadable
            context.recorder = self._training
            if rows is not None and is_complete:
                self.exchange.take(rows, plan)
                self.bus.queue.append(Finished(rows, None))
        context.tracker.pass_ends()
        is_open = context.tracker.state is not State.IDLE
        if is_open:
            self._install_modules()
        self._modules.set_sampled(context.recorder.plan if is_open else self._next_plan())
        self.bus.drain()

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
                self.end_pass(is_complete=False)
            self.begin_pass(before)
            raise

    def _run_paused(self, body: Callable[[], None]) -> None:
        context, before = self.context, self.context.is_paused

        def run() -> None:
            context.is_paused = True
            body()

        restoring(run, lambda: setattr(context, "is_paused", before))

    def log(self, name: str, value: Any, step: int | None) -> None:
        """Keep a value of the user's own until its step ends."""
        if (process := os.getpid()) != self._process:
            if process != self._warned_process:
                self._warned_process = process
                warn_of_worker(name)
            return
        tracker = self.context.tracker
        stamp = tracker.pass_stamp(tracker.pass_name)
        self.logged.add(name, value, stamp if step is None else replace(stamp, global_step=step))

    def change_sampling(self, paused: bool | None = None, every: int | None = -1) -> None:
        """Change what is sampled from the next step on; see `Sampling.change`."""
        tracker = self.context.tracker
        next_step = tracker.counters.global_step + (tracker.state is not State.IDLE)
        self.bus.sampling.change(next_step, paused, every)
        self._demand = Demand()
        self.demand_changed()
        if tracker.state is State.IDLE and tracker.pass_name == TRAINING:
            self._modules.keep_for(self._next_plan())

    def _follow_control_file(self) -> None:
        """Change the sampling as another process requests it, unless other ranks would sample other steps."""
        if (run := self.bus.run) is None or (request := run.control.take()) is None:
            return
        if World.here().size > 1:
            log.warning("%s is ignored, because all ranks must sample the same steps", CONTROL_FILE)
            return
        self.change_sampling(*request)
        log.info("sampling is changed by %s: %s", CONTROL_FILE, request)

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
    def finish(self, for_good: bool = False) -> None:
        """Close whatever is open, and remove the hooks of modules."""
        if for_good:
            self.exchange.prepare_close()
        self.end_pass()
        self.apply(self.context.tracker.finish())
        if for_good:
            self.logged.step_ends()
            self._forward.warn_of_missing_steps()
            self.optimizers.untrained.finish()
        self._modules.remove(everything=True)
