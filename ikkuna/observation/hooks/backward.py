"""Recognises running backwards, and reports to the tracker which forwards they reach."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.observation.hooks.call_stack import accumulates_gradients
from ikkuna.observation.hooks.context import HookContext
from ikkuna.observation.hooks.hook import Hook, in_backward
from ikkuna.observation.hooks.loss import LossHooks
from ikkuna.observation.hooks.nested_tensors import Leaves
from ikkuna.observation.model.parameters import Backward, GradientState
from ikkuna.observation.steps.forwards import Forward
from ikkuna.support.torch_internals import graph_task, keeps_graph, sequence_number

_MOST_OUTPUTS = 64


@dataclass(slots=True)
class _Running:
    """A running backward, and the forwards that it has reached."""

    kind: Backward
    before: GradientState | None
    forwards: list[Forward] = field(default_factory=list)


class _EndHook(Hook):
    """The hook at the end of a backward, which is called whether anything is recorded or not."""

    __slots__ = ()

    def resumes(self, context: HookContext) -> bool:
        """Return ``True``."""
        return True


class BackwardHooks:
    """Reports to the tracker which forwards a backward reaches.

    A backward that does not reach the parameters does not count.  A backward around a reentrant checkpoint may reach them through
    the checkpoint's own backward; this shows at its end, in the parameters' gradients.
    Until then gradients of layers are recorded in the forward's provisional part.

    Parameters
    ----------
    context : HookContext
    loss : LossHooks
        Records the loss of which a backward computes gradients.

    Attributes
    ----------
    has_accumulated : bool
        Whether a backward has added to gradients of parameters, in any step that was recorded.
    running : dict
        The backwards that have begun; one that raises stays until the step ends.
    ended : list of callable
        Called at the end of each backward that has added to gradients of parameters, if a step records them before they are clipped.
    """

    def __init__(self, context: HookContext, loss: LossHooks) -> None:
        self.context = context
        self._loss = loss
        loss.arm = self.arm
        self.has_accumulated = False
        self.ended: list[Callable[[], None]] = []
        self.running: dict[int, _Running] = {}
        self._reached, self._ended = (
            Hook(self, BackwardHooks.output_reached),
            _EndHook(self, BackwardHooks.backward_ended),
        )

    def arm(self, outputs: Leaves, forward: Forward) -> None:
        """Register hooks on the outputs of a forward that report a backward."""
        hook = partial(self._reached, forward)
        if self._loss.is_looking:
            self._loss.outputs_armed(outputs)
        for _, tensor in outputs[:_MOST_OUTPUTS]:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(hook)
                base = tensor._base  # an in-place operation on a view cuts its hook off
                if base is not None and base.requires_grad and not base.is_leaf:
                    base.register_hook(hook)

    def output_reached(self, forward: Forward, grad: Tensor) -> None:
        """Handle the gradient of an output of a forward."""
        self.reach(forward)
        if (objective := self._loss.objective) is not None:
            objective.output_gradient(grad)

    def reach(self, forward: Forward) -> int:
        """Report that the running backward has reached a forward; return the part to which gradients are recorded, or -1."""
        running = self.running.get(task := graph_task()) or self._begin(task, forward)
        kind = running.kind
        if kind is Backward.PASSES_BY:
            return -1
        accumulates = kind is Backward.ACCUMULATES
        if forward not in running.forwards:
            running.forwards.append(forward)
            if kind is not Backward.CHECKPOINTED:
                captured = kind is Backward.CAPTURES
                if decisions := self.context.tracker.backward_reached(forward, captured, keeps_graph()):
                    self.context.apply(decisions)
            if len(running.forwards) == 1:
                self._loss.backward_begins(forward.part if accumulates else forward.provisional_part)
        return forward.part if accumulates else forward.provisional_part

    def reach_latest(self) -> int | None:
        """Report that the running backward has reached the forward that it reached last, or else the latest one."""
        latest = self.context.tracker.forwards.latest
        reached = (self.running.get(task := graph_task()) or self._begin(task, latest)).forwards
        forward = reached[-1] if reached else self.context.tracker.forwards.latest
        return None if forward is None else self.reach(forward)

    def _begin(self, task: int, forward: Forward | None) -> _Running:
        parameters = self.context.parameters
        before_kind = sequence_number()
        kind = parameters.backward_kind()
        self.context.computation.leave_out(sequence_number() - before_kind)
        if kind is Backward.PASSES_BY and parameters.are_frozen() and accumulates_gradients():
            kind = Backward.ACCUMULATES
        if kind is Backward.ACCUMULATES and (parameters.noted is not None or self.running):
            self.report_cleared(forward)
        elif kind is Backward.ACCUMULATES and self.context.recorder.plan.reports_parameters:
            parameters.note_kept_gradients()
        before = parameters.gradient_state() if kind is Backward.CHECKPOINTED else None
        running = self.running[task] = _Running(kind, before)
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        Variable._execution_engine.queue_callback(partial(self._ended, task, is_distributed))
        return running

    def report_cleared(self, reached: Forward | None = None) -> None:
        """Report gradients that were cleared since the last backward; during another pass the open step waits.

        Parameters
        ----------
        reached : Forward, optional
            The forward that the running backward has reached first.
        """
        context = self.context
        if context.tracker.pass_name == TRAINING and (
            (context.parameters.noted is not None and context.parameters.gradients_cleared())
            or (self.running and self._was_undone())
        ):
            context.parameters.forget_gradients()
            self._loss.gradients_cleared()
            context.apply(context.tracker.gradients_cleared(reached))

    def _was_undone(self) -> bool:
        """Whether a backward has raised, so that its end was not seen, and its gradients were cleared since."""
        return not in_backward() and self.context.parameters.gradients_are_absent()

    def backward_ended(self, task: int, again: bool) -> None:
        """Handle the end of a backward; with `again` after the callbacks that others have queued during the backward.

        Data-parallel wrappers have reduced the gradients then.
        """
        context = self.context
        if again:
            Variable._execution_engine.queue_callback(partial(self._ended, task, False))
            return
        running = self.running.pop(task, None)
        if running is None:
            return
        parameters = context.parameters
        if running.kind is Backward.CHECKPOINTED and parameters.gradient_state() != running.before:
            running.kind = Backward.ACCUMULATES
            for forward in running.forwards:
                context.apply(context.tracker.provisional_counts(forward))
        if running.kind is Backward.ACCUMULATES and not context.is_off:
            self.has_accumulated = True
            parameters.note_gradients()
            if context.recorder.plan.unclipped_gradients:
                for call in self.ended:
                    call()

    def step_ended(self) -> None:
        """Forget the gradients of the step, and backwards that have raised."""
        self.context.parameters.noted = None
        if graph_task() == -1:
            self.running.clear()
