"""Records passes over data beside the training, such as validation."""

from collections.abc import Callable

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.hook_set import HookSet
from ikkuna.export.messages.stamp import TRAINING
from ikkuna.export.ranks.exchange import Exchange
from ikkuna.export.rows.delivery import Finished
from ikkuna.export.rows.recorder import Recorder
from ikkuna.export.session.replaced_modules import ReplacedModules
from ikkuna.export.session.sampling_plans import SamplingPlans
from ikkuna.export.session.step_cycle import StepCycle
from ikkuna.export.steps.step_tracker import State

__all__ = ["OtherPasses"]


class OtherPasses:
    """Records a pass over data under its own name, in a recorder of its own; an open training step waits.

    Parameters
    ----------
    bus : MessageBus
        Receives the measurements.
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    plans : SamplingPlans
        Decides what a pass measures.
    replaced : ReplacedModules
        Observes modules that were replaced.
    exchange : Exchange
        Merges the measurements of all ranks.
    cycle : StepCycle
        Carries out the decisions of the step tracker.
    new_recorder : callable
        Returns the recorder of a pass.
    """

    def __init__(
        self,
        bus: MessageBus,
        context: HookContext,
        hooks: HookSet,
        plans: SamplingPlans,
        replaced: ReplacedModules,
        exchange: Exchange,
        cycle: StepCycle,
        new_recorder: Callable[[], Recorder],
    ) -> None:
        self._bus, self._context, self._hooks = bus, context, hooks
        self._plans, self._replaced, self._exchange, self._cycle = plans, replaced, exchange, cycle
        self._new_recorder = new_recorder
        self._training = context.recorder

    def begin(self, name: str) -> None:
        """Record another pass under its own name, until `end`; ``"training"`` ends the present one."""
        context = self._context
        if name == context.tracker.pass_name:
            return
        self.end()
        if name == TRAINING:
            return
        self._cycle.apply(context.tracker.pass_begins(name))
        self._hooks.modules.remove()
        self._open()

    def _open(self) -> None:
        context = self._context
        context.recorder = self._new_recorder()
        self._cycle.record(context.tracker.pass_stamp(context.tracker.pass_name))
        self._replaced.follow()
        self._hooks.install_modules()
        self._hooks.modules.set_sampled_pass(context.recorder.plan)

    def end(self, is_complete: bool = True) -> None:
        """Return to training, and publish the measurements of the other pass if they are complete."""
        context, modules, recorder = self._context, self._hooks.modules, self._context.recorder
        if context.tracker.pass_name == TRAINING:
            return
        self._hooks.gradients.step_ended()
        modules.remove()
        if recorder is not self._training:
            plan, rows = recorder.plan, recorder.close()
            self._training.unreadable |= recorder.unreadable
            context.recorder = self._training
            if rows is not None and is_complete:
                self._exchange.take(rows, plan)
                self._bus.queue.append(Finished(rows, None))
        context.tracker.pass_ends()
        is_open = context.tracker.state is not State.IDLE
        if is_open:
            self._hooks.install_modules()
        modules.set_sampled(context.recorder.plan if is_open else self._plans.of_next_step())
        self._bus.drain()

    def abandon(self) -> None:
        """Drop the measurements of the open step and of the pass; training or the same pass begins again."""
        context = self._context
        for recorder in (self._training, context.recorder):
            recorder.close()
        self._hooks.step_ended()
        self._hooks.optimizers.step_ended()
        self._hooks.modules.remove()
        self._hooks.modules.remove_lost()
        if context.tracker.pass_name == TRAINING:
            context.recorder = self._training
            self._cycle.prepare_next()
        else:
            self._open()
