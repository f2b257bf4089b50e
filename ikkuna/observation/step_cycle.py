"""Carries out the decisions of the step tracker: steps are opened, recorded, closed and delivered."""

from collections.abc import Callable
from typing import Any

import torch

from ikkuna.diagnosis.mistakes import STEPS_LEFT_OUT
from ikkuna.distributed.rendezvous import World
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Event, Finished, Item
from ikkuna.metrics.messages.kinds import PARAMETER_KINDS
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import TRAINING, Stamp
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.device import warm_up
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook_set import HookSet
from ikkuna.observation.hooks.loss import LossHooks
from ikkuna.observation.hooks.modules import ModuleHooks
from ikkuna.observation.idle_steps import IdleSteps
from ikkuna.observation.logged_values import LoggedValues
from ikkuna.observation.ranks import Exchange
from ikkuna.observation.rows.plan import Demand, Plan
from ikkuna.observation.rows.rows import Rows
from ikkuna.observation.steps.forwards import (
    MICRO_PART,
    Abandoned,
    Awaited,
    Closed,
    Decision,
    EpochFinished,
    Merged,
    Opened,
    Restarted,
)
from ikkuna.observation.steps.step_tracker import State
from ikkuna.observation.validation import Validation
from ikkuna.printable import counted
from ikkuna.store.run_directory import CONTROL_FILE
from ikkuna.support.failures import log, remember_handlers
from ikkuna.support.random_states import RandomNumbers

_MANY_THROWN_AWAY = 20
_MOST_EXTRA = 32  # measurements of earlier steps have been delivered


class SamplingPlans(Demand):
    """The plans of steps, and the changes of what is sampled.

    Parameters
    ----------
    bus : MessageBus
        Knows the subscribers.
    context : HookContext
    modules : ModuleHooks
        Prepared for what is wanted.
    """

    _bus: MessageBus

    def __init__(self, bus: MessageBus, context: HookContext, modules: ModuleHooks) -> None:
        super().__init__(bus)
        self._context, self._modules = context, modules

    def count_idle(self) -> float:
        """Return how many steps from the next one on need no more than the loss, and do not end an epoch."""
        tracker = self._context.tracker
        if tracker.stamp.completes:
            return 0
        counters = tracker.counters
        return min(self.steps_until_sample(counters.next.global_step), counters.steps_left - 1)

    def of_next_step(self) -> Plan:
        """Return the plan of the open step, or of the next one."""
        return self.of(self._context.tracker.stamp)

    def measure(self, stamp: Stamp) -> Plan:
        """Let each subscriber that needs no forward sample a step; return its plan."""
        extra = self._bus.sampling.extra
        extra.add(stamp.global_step)
        if len(extra) > _MOST_EXTRA:
            extra.remove(min(extra))
        self.reset()
        return self.of(stamp)

    def demand_changed(self) -> None:
        """Handle a change of what subscribers want."""
        wishes = Plan(tuple(r for r in self._bus.registered if not r.disabled))
        if wishes.takes_data:
            tensors = (named.parameter for named in self._context.parameters.all)
            parameters = {(x.device, x.dtype) for x in tensors if not x.is_cpu}
            warm_up(
                parameters, {needed_fields(r.subscriber.fields) for r in wishes.subscriptions if r.subscriber.fields}
            )
        if self._modules.prepare(wishes, self.of_next_step()):
            log.warning("torch.compiler.reset(): the model was compiled before all that is wanted of it now was known")
            torch.compiler.reset()

    def change_sampling(self, paused: bool | None = None, every: int | None = -1) -> None:
        """Change what is sampled from the next step on; see `Sampling.change`."""
        tracker = self._context.tracker
        next_step = tracker.counters.next.global_step + (tracker.state is not State.IDLE)
        self._bus.sampling.change(next_step, paused, every)
        self.reset()
        self.demand_changed()
        if tracker.state is State.IDLE and tracker.pass_name == TRAINING:
            self._modules.keep_for(self.of_next_step())

    def follow_control_file(self) -> None:
        """Change the sampling as another process requests it, unless other ranks would sample other steps."""
        if (run := self._bus.run) is None or (request := run.control.take()) is None:
            return
        if World.here().size > 1:
            log.warning("%s is ignored, because all ranks must sample the same steps", CONTROL_FILE)
            return
        self.change_sampling(request.paused, request.every)
        log.info("sampling is changed by %s: %s", CONTROL_FILE, request)


class MissingLossWarning:
    """Warns once that a subscriber wants the loss or the labels, and they are unknown.

    Parameters
    ----------
    context : HookContext
    losses : LossHooks
        Knows whether a loss and labels were seen.
    """

    def __init__(self, context: HookContext, losses: LossHooks) -> None:
        self._context, self._losses = context, losses
        self._has_warned = False

    def step_ended(self, steps: int) -> None:
        """Warn at the end of a sampled step, if there is a reason to.

        Parameters
        ----------
        steps : int
            Number of training steps so far.
        """
        if self._has_warned or not self._context.recorder.plan.of_loss:
            return
        if not self._is_early(steps) and (missing := self._missing()):
            self._has_warned = True
            log.warning(
                "%s cannot be seen, and what needs them is not measured: pass the module or function that computes the loss, as in "
                "monitor = watch(model, loss); if the loop does not call it itself, let it call what loss = monitor.set_loss(loss) returns",
                missing,
            )

    def _is_early(self, steps: int) -> bool:
        """Return whether it cannot be known yet how the model is called.

        The first step only shows that a model is never called as a whole; a model in evaluation mode seems to be such for two steps.
        """
        if not self._context.tracker.is_rootless:
            return False
        whole = self._context.model.roots.whole
        return steps <= (1 if whole is None or whole.training else 2)

    def _missing(self) -> str:
        """Return what is wanted and unknown; empty if nothing is."""
        wanted = self._context.recorder.plan.of_loss
        if not self._losses.has_loss and "loss" in wanted:
            missing = "the loss"
        elif not self._losses.has_labels and "input_labels" in wanted:
            missing = "the labels"
        else:
            return ""
        return missing if self._context.model.sees_loss else ""


class ReplacedModules:
    """Observes the modules and parameters that the user has put in place of others since they were added.

    Parameters
    ----------
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    taken : callable
        Returns the names of modules that other exporters of the bus observe.
    demand_changed : callable
        Called when other modules are observed.
    """

    def __init__(
        self,
        context: HookContext,
        hooks: HookSet,
        taken: Callable[[], frozenset[str]],
        demand_changed: Callable[[], None],
    ) -> None:
        self._context, self._hooks = context, hooks
        self._taken, self._demand_changed = taken, demand_changed
        self._has_warned = False

    def follow(self, inside_step: bool = False) -> None:
        """Find replaced modules and parameters, and observe them.

        The hooks of a compiled model cannot change inside a step, because its graph runs then.
        """
        context = self._context
        parameters = context.parameters
        try:
            if parameters.children.have_changed() and not (inside_step and context.model.is_compiled):
                self._follow_modules()
            elif parameters.held.have_changed():
                parameters.refresh()
        except Exception as error:  # of the user's filter of modules, for example
            context.error_guard.report_internal("finding the modules that were replaced", error)

    def _follow_modules(self) -> None:
        context, model = self._context, self._context.model
        try:
            change = model.follow(self._taken())
        finally:
            context.parameters.track(model.modules, model.callable)
        if not change.names:  # a wrapper was put around a module
            return
        self._hooks.modules.forget(change.names)
        self._hooks.include_copies()
        self._demand_changed()
        if not self._has_warned:
            self._has_warned = True
            log.warning("the model has changed since it was added: %s", change)


class StepCycle:
    """Carries out the decisions of the step tracker.

    Parameters
    ----------
    bus : MessageBus
        Receives measurements and events.
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    plans : SamplingPlans
        Decides what a step measures.
    replaced : ReplacedModules
        Observes modules that were replaced.
    exchange : Exchange
        Merges the measurements of all ranks.
    logged : LoggedValues
        The values that the user logs.
    validation : Validation
        Records evaluations in the training loop.
    """

    def __init__(
        self,
        bus: MessageBus,
        context: HookContext,
        hooks: HookSet,
        plans: SamplingPlans,
        replaced: ReplacedModules,
        exchange: Exchange,
        logged: LoggedValues,
        validation: Validation,
    ) -> None:
        self._bus, self._context, self._hooks = bus, context, hooks
        self._plans, self._replaced = plans, replaced
        self._exchange, self._logged, self._validation = exchange, logged, validation
        self._missing_loss = MissingLossWarning(context, hooks.losses)
        self._idle = IdleSteps(bus, context, hooks, logged, lambda: exchange.is_shared, self._counting_ended)
        self._steps = 0
        self._has_reported_steps_left_out = False
        self._random_numbers = RandomNumbers()

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self._steps + self._idle.steps

    def apply(self, decisions: tuple[Decision, ...]) -> None:
        """Carry out decisions of the step tracker, in order."""
        for decision in decisions:
            match decision:
                case Opened():
                    self._open(decision)
                case Merged(source, target):
                    if (rows := self._context.recorder.rows) is not None:
                        rows.merge_part(source, target)
                case Restarted():
                    self._restart(decision)
                case Closed():
                    self._close(decision)
                case Awaited(stamp):
                    self._prepare_following(stamp)
                case Abandoned():
                    self._hooks.step_ended()
                    self._hooks.optimizers.step_ended()
                    self._context.recorder.close()
                case EpochFinished(stamp):
                    self._finish_epoch(stamp)

    # -- the beginning of a step ----------------------------------------------------------------------------------

    def _open(self, opened: Opened) -> None:
        stamp, recorder = opened.stamp, self._context.recorder
        if self._validation.is_open or self._context.events.repeated > 1:
            self._validation.end()
        if opened.starts_epoch:
            self._bus.queue.append(Event(NetworkMessage(stamp, "epoch_started")))
        if "batch_started" in self._bus.by_kind:
            self._bus.queue.append(Event(NetworkMessage(stamp, "batch_started")))
        if not opened.is_carried or recorder.rows is None:
            if recorder.rows is not None:  # an exception has kept them from being closed
                recorder.close()
            self.record(stamp)
        if recorder.rows is not None:  # the code of others will run
            remember_handlers()
        if (observer := self._context.observer) is not None:
            observer.step_opened(stamp, recorder.plan)
        if recorder.plan.takes_data:
            self._replaced.follow(inside_step=True)
        self._hooks.step_opened()

    def record(self, stamp: Stamp) -> None:
        """Begin to record a step, or another pass."""
        context, exchange = self._context, self._exchange
        if exchange.first_step is None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            exchange.step_opened(stamp)
        if not context.model.knows_stages:
            context.model.find_stages()
        context.replicas = exchange.replicas
        context.recorder.open(stamp, self._plans.of(stamp))
        if context.recorder.plan.reports_parameters:
            self._random_numbers.step_opened()

    def _prepare_following(self, stamp: Stamp) -> None:
        """Register the hooks of the step that the next call of a part opens, while the present one waits for other optimizers."""
        if not (self._context.recorder.plan.forward or self._context.model.is_compiled):
            self._hooks.modules.install(self._plans.of(stamp))

    def _restart(self, restarted: Restarted) -> None:
        if (rows := self._context.recorder.rows) is None:
            return
        for part in restarted.parts:
            rows.drop_part(part)
        for part in restarted.anew:
            rows.drop_backward(part, self._hooks.losses.takes_arguments)
        if MICRO_PART in restarted.parts:
            rows.renew_stamp()
        if restarted.parameters:
            rows.drop(frozenset((*PARAMETER_KINDS, *self._context.recorder.plan.states)))
            self._hooks.optimizers.step_ended()

    # -- the end of a step ----------------------------------------------------------------------------------------

    def _close(self, closed: Closed) -> None:
        bus, context, optimizers = self._bus, self._context, self._hooks.optimizers
        if closed.skipped:
            self._count_thrown_away(closed)
        else:
            if optimizers.table.is_used or optimizers.untrained.settled is None:
                optimizers.before_close()
            self._steps += 1
        self._hooks.step_ended()
        lap, step = context.stopwatch.lap(), None
        if self._logged.is_used:
            self._logged.step_ends(closed.stamp.global_step)
        if context.recorder.rows is not None:
            if context.recorder.plan.of_loss:
                self._missing_loss.step_ended(self.steps)
            bus.queue.append(step := self._finished(context.recorder.rows, closed, lap))
        else:
            self._pass_over(closed)
        optimizers.step_ended()
        plan = None if closed.carried else self.prepare_next()
        if (run := bus.run) is not None and run.control.request is not None:
            self._plans.follow_control_file()
        if step is not None and bus.calls_model and not self._exchange.is_shared:
            step.evaluate(bus)
        bus.drain(wait=self._exchange.gather is not None and self._exchange.must_wait(closed.stamp))
        context.stopwatch.step_ended()
        # the beginning of the next step ends an evaluation inside of this one
        if plan is not None and plan.needs_losses_alone and not self._validation.is_open:
            self._idle.begin(self._plans)

    def _count_thrown_away(self, closed: Closed) -> None:
        """Count gradients that no optimizer has used; report once that most are so.

        Steps that a gradient scaler may have skipped do not count, nor do backwards for gradients of the inputs.
        """
        context, events = self._context, self._context.events
        if context.loss_scale.is_used or closed.of_inputs:
            return
        events.gradients_cleared(
            closed.stamp.global_step, sum([named.parameter._version for named in context.parameters.all])
        )
        if (
            self.steps
            and events.thrown_away >= max(_MANY_THROWN_AWAY, self.steps)
            and not self._has_reported_steps_left_out
        ):
            self._has_reported_steps_left_out = True
            detail = f"Optimizers have made {counted(self.steps, 'step')}."
            context.found(STEPS_LEFT_OUT.found(events.thrown_away, detail=detail))

    def _report(self, numbers: tuple[int, ...], closed: Closed, lap: tuple[float, float] | None) -> dict[str, Any]:
        """Return what ``batch_finished`` says about the step of the optimizers with these numbers."""
        optimizers, events = self._hooks.optimizers, self._context.events
        facts = {
            "evaluations_in_training_mode": 0 if events.in_evaluation_mode else events.in_training_mode,
            "micro_batches": closed.micro_batches,
            "undivided_losses": self._hooks.losses.undivided,
            "averaged_ranks": self._context.replicas,
        }
        if self._context.recorder.plan.reports_parameters:
            facts["gradients_at_step"] = optimizers.gradients
            if (kept := self._context.parameters.gradients_kept) is not None:
                facts["gradients_kept"] = kept
            if (are_repeated := self._random_numbers.are_repeated(numbers)) is not None:
                facts["random_numbers_repeated"] = are_repeated
        report = {
            "learning_rates": optimizers.rates,
            "settings": optimizers.settings,
            "has_closure": optimizers.has_closure,
            "has_scaler": self._context.loss_scale.is_used,
            "unowned": self._context.parameters.owners().unowned,
            "facts": facts,
        }
        return report if lap is None else report | {"seconds": lap[0], "own_seconds": lap[1]}

    def _finished(self, rows: Rows, closed: Closed, lap: tuple[float, float] | None) -> Finished:
        """Return the step with its measurements, and its event if a subscriber or the observer takes it."""
        recorder, plan, observer = self._context.recorder, self._context.recorder.plan, self._context.observer
        numbers, known = self._hooks.losses.numbers_of(closed.optimizers), closed.stamp
        stamp = Stamp(known.global_step, known.train_step, known.epoch, known.pass_name, numbers, known.completes)
        rows.skipped, event = rows.skipped or closed.skipped, None
        if observer is not None or "batch_finished" in plan.kinds:
            event = NetworkMessage(stamp, "batch_finished", self._report(numbers, closed, lap), skipped=rows.skipped)
            rows.rates = dict(event.data["learning_rates"])  # rates on an accelerator travel with the rows
        recorder.close(closed.parts, closed.carried)
        rows.stamp = stamp
        if self._exchange.world is None or self._exchange.gather is not None:
            self._exchange.take(rows, plan)
        return Finished(rows, event, observer)

    def _pass_over(self, closed: Closed) -> None:
        """End a step that no subscriber samples."""
        context, stamp = self._context, closed.stamp
        context.recorder.close(carried=closed.carried)
        if context.observer is not None and not closed.skipped:
            context.observer.step_passed(stamp)
        self._exchange.meet()
        if len(self._bus.queue):
            self._bus.queue.append(Item(stamp))
        else:
            self._bus.commit(stamp.global_step)

    def prepare_next(self) -> Plan:
        """Prepare the hooks of modules for the next step; return its plan."""
        context, modules = self._context, self._hooks.modules
        if (
            modules.switch is not None
            and not context.model.is_compiled
            and modules.compiled.includes(context.model.roots.callable)
        ):  # a root proves to be compiled that was not known to be
            self._plans.demand_changed()
        plan = self._plans.of(context.tracker.stamp)
        if plan.takes_data and context.model.is_compiled:
            self._replaced.follow()
        if modules.sampled_for is not plan or modules.installed_for is not plan:
            modules.keep_for(plan)
            modules.set_sampled(plan)
        if context.tracker.is_rootless:
            modules.install(plan)  # no call of a root will announce the next step
        return plan

    def _counting_ended(self) -> None:
        """Handle the end of the last step that was counted: if the next ones can be counted too, deliver the losses so far."""
        plan, stopwatch = self.prepare_next(), self._context.stopwatch
        if plan.needs_losses_alone and self._plans.count_idle() > 0:
            stopwatch.start()
            try:
                self._bus.drain()
            finally:
                stopwatch.stop()
            self._idle.begin(self._plans)

    def _finish_epoch(self, stamp: Stamp) -> None:
        bus = self._bus
        self._validation.end()
        self._logged.step_ends(stamp.global_step, is_epoch=True)
        bus.queue.append(event := Event(NetworkMessage(stamp, "epoch_finished")))
        self._replaced.follow()
        if bus.calls_model and not self._exchange.is_shared:
            event.evaluate(bus)
        bus.drain(wait=self._exchange.must_wait(None))
