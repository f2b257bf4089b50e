"""Carries out the decisions of the step tracker: steps are opened, recorded, closed and delivered."""

from typing import Any

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.hook_set import HookSet
from ikkuna.export.logged_values import LoggedValues
from ikkuna.export.messages.kinds import PARAMETER_KINDS
from ikkuna.export.messages.message import NetworkMessage
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.ranks.exchange import Exchange
from ikkuna.export.rows.delivery import Event, Finished, Unsampled
from ikkuna.export.session.missing_loss import MissingLossWarning
from ikkuna.export.session.replaced_modules import ReplacedModules
from ikkuna.export.session.sampling_plans import SamplingPlans
from ikkuna.export.steps.decisions import Abandoned, Closed, Decision, EpochFinished, Merged, Opened, Restarted
from ikkuna.export.steps.forward import MICRO_PART

__all__ = ["StepCycle"]


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

    Attributes
    ----------
    steps : int
        Number of training steps.
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
    ) -> None:
        self._bus, self._context, self._hooks = bus, context, hooks
        self._plans, self._replaced = plans, replaced
        self._exchange, self._logged = exchange, logged
        self._missing_loss = MissingLossWarning(context, hooks.losses)
        self.steps = 0

    def apply(self, decisions: tuple[Decision, ...]) -> None:
        """Carry out decisions of the step tracker, in order."""
        for decision in decisions:
            match decision:
                case Opened():
                    self._open(decision)
                case Merged(source, target):
                    if (rows := self._context.recorder.rows) is not None:
                        rows.merge_part(source, target)
                case Restarted(parts, parameters):
                    self._restart(parts, parameters)
                case Closed():
                    self._close(decision)
                case Abandoned():
                    self._hooks.step_ended()
                    self._hooks.optimizers.step_ended()
                    self._context.recorder.close()
                case EpochFinished(stamp):
                    self._finish_epoch(stamp)

    # -- the beginning of a step ----------------------------------------------------------------------------------

    def _open(self, opened: Opened) -> None:
        stamp, recorder = opened.stamp, self._context.recorder
        if opened.starts_epoch:
            self._bus.queue.append(NetworkMessage(stamp, "epoch_started"))
        if self._bus.is_wanted("batch_started"):
            self._bus.queue.append(NetworkMessage(stamp, "batch_started"))
        if not opened.is_carried or recorder.rows is None:
            if recorder.rows is not None:  # an exception has kept them from being closed
                recorder.close()
            self.record(stamp)
        if (observer := self._context.observer) is not None:
            observer.step_opened(stamp, recorder.plan)
        if recorder.plan.takes_data:
            self._replaced.follow(inside_step=True)
        self._hooks.step_opened()

    def record(self, stamp: Stamp) -> None:
        """Begin to record a step, or another pass."""
        context = self._context
        self._exchange.step_opened(stamp)
        context.model.find_stages()
        context.replicas = self._exchange.replicas
        context.recorder.open(stamp, self._plans.of(stamp))

    def _restart(self, parts: tuple[int, ...], parameters: bool) -> None:
        if (rows := self._context.recorder.rows) is None:
            return
        for part in parts:
            rows.drop_part(part)
        if MICRO_PART in parts:
            rows.renew_stamp()
        if parameters:
            rows.drop(frozenset((*PARAMETER_KINDS, *self._context.recorder.plan.states)))
            self._hooks.optimizers.step_ended()

    # -- the end of a step ----------------------------------------------------------------------------------------

    def _close(self, closed: Closed) -> None:
        bus, context, optimizers = self._bus, self._context, self._hooks.optimizers
        if not closed.skipped:
            optimizers.before_close()
            self.steps += 1
        self._hooks.step_ended()
        lap, rates, has_closure = context.stopwatch.lap(), optimizers.rates, optimizers.has_closure
        optimizers.step_ended()
        self._logged.step_ends(closed.stamp.global_step)
        step = None
        if context.recorder.rows is not None:
            self._missing_loss.step_ended(self.steps)
            bus.queue.append(step := self._finished(closed, rates, has_closure, lap))
        else:
            self._pass_over(closed)
        if not closed.carried:
            self.prepare_next()
        self._plans.follow_control_file()
        if step is not None and bus.calls_model and not self._exchange.is_shared:
            step.evaluate(bus)
        bus.drain(wait=self._exchange.must_wait(closed.stamp))
        run = bus.run
        context.stopwatch.step_ended(0.0 if run is None else run.drawing_seconds)

    def _finished(
        self, closed: Closed, rates: dict[str, Any], has_closure: bool, lap: tuple[float, float] | None
    ) -> Finished:
        """Return the step with its measurements and its event."""
        recorder = self._context.recorder
        report: dict[str, Any] = {
            "learning_rates": rates,
            "has_closure": has_closure,
            "unowned": self._context.parameters.known_owners().unowned,
        }
        if lap is not None:
            report["seconds"], report["own_seconds"] = lap
        event = NetworkMessage(closed.stamp, "batch_finished", report)
        assert recorder.rows is not None
        recorder.rows.rates = dict(rates)  # rates on an accelerator travel with the rows
        plan, rows = recorder.plan, recorder.close(closed.parts, closed.carried)
        assert rows is not None
        rows.skipped = event.skipped = rows.skipped or closed.skipped
        self._exchange.take(rows, plan)
        return Finished(rows, event, self._context.observer)

    def _pass_over(self, closed: Closed) -> None:
        """End a step that no subscriber samples."""
        context, stamp = self._context, closed.stamp
        context.recorder.close(carried=closed.carried)
        if context.observer is not None and not closed.skipped:
            context.observer.step_passed(stamp)
        self._exchange.meet()
        if len(self._bus.queue):
            self._bus.queue.append(Unsampled(stamp))
        else:
            self._bus.commit(stamp.global_step)

    def prepare_next(self) -> None:
        """Prepare the hooks of modules for the next step."""
        context, modules = self._context, self._hooks.modules
        if modules.is_found_compiled():
            self._plans.demand_changed()
        plan = self._plans.of_next_step()
        if plan.takes_data and context.model.is_compiled:
            self._replaced.follow()
        modules.keep_for(plan)
        modules.set_sampled(plan)
        if context.tracker.is_rootless:
            modules.install(plan)  # no call of a root will announce the next step

    def _finish_epoch(self, stamp: Stamp) -> None:
        bus = self._bus
        self._logged.step_ends(stamp.global_step)
        bus.queue.append(event := Event(NetworkMessage(stamp, "epoch_finished")))
        self._replaced.follow()
        if bus.calls_model and not self._exchange.is_shared:
            event.evaluate(bus)
        bus.drain(wait=self._exchange.must_wait(None))
