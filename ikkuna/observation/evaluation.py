"""Passes over data beside the training, such as validation."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Finished
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.elements import on_device
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook_set import HookSet
from ikkuna.observation.hooks.loss import without_ignored
from ikkuna.observation.ranks import Exchange
from ikkuna.observation.rows.recorder import Recorder
from ikkuna.observation.step_cycle import ReplacedModules, SamplingPlans, StepCycle
from ikkuna.observation.steps.step_tracker import State
from ikkuna.support.undisturbed import call_model, run_undisturbed


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


def run(
    model: nn.Module,
    loss: nn.Module | None,
    batches: Iterable[Any],
    visit: Callable[[Any, Any], object] | None = None,
    call: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Run the model over batches and restore its state and all random states afterwards.

    Parameters
    ----------
    model : nn.Module
        The model; it runs in evaluation mode.
    loss : nn.Module, optional
        Called with outputs and labels.
    batches : iterable
        Pairs ``(inputs, labels)``, or inputs.
    visit : callable, optional
        Called with outputs and labels, in which -100 stands for those that the loss leaves out.
    call : callable, optional
        ``call(model, inputs)`` returns the outputs; by default a tuple or dict of inputs becomes the arguments of the model.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def visit_all() -> None:
        for batch in batches:
            pair = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
            inputs, labels = (_to(part, device) for part in pair)
            outputs = (call or call_model)(model, inputs)
            if loss is not None and isinstance(outputs, Tensor) and isinstance(labels, Tensor):
                loss(outputs, labels)
            if visit is not None:
                ignored = getattr(loss, "ignore_index", None)
                visit(outputs, without_ignored(labels, ignored) if isinstance(labels, Tensor) else labels)

    run_undisturbed(visit_all, model, batches)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return on_device(value, device) if value.is_cpu else value.to(device)
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_to(part, device) for part in value)
    return value
