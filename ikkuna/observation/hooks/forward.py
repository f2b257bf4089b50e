"""Handles the calls of roots and of observed modules."""

import gc
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.diagnosis.mistakes import MISSING_STEP, NO_BATCH
from ikkuna.metrics.messages.stamp import TRAINING
from ikkuna.numerics.elements import has_storage
from ikkuna.numerics.statistics.native.hook_functions import Function
from ikkuna.observation.hooks.backward import BackwardHooks
from ikkuna.observation.hooks.call_stack import count_running_calls, in_dry_run, in_reentrant_checkpoint
from ikkuna.observation.hooks.context import HookContext, ObservedSites, running_steps
from ikkuna.observation.hooks.gradients import LayerGradientHooks
from ikkuna.observation.hooks.loss import LossHooks
from ikkuna.observation.hooks.nested_tensors import Leaves, batch_sizes, leaves, received, with_batch_sizes
from ikkuna.observation.steps.forwards import Forward
from ikkuna.observation.steps.step_tracker import State
from ikkuna.printable import listed
from ikkuna.support.failures import suppressed
from ikkuna.support.torch_internals import graph_task, sequence_number

_MANY = 100  # forwards without a step: more than a step usually accumulates
_SAMPLE = 8  # parameters, and elements of each, that show whether a model is trained
_FEW = 20  # a gradient scaler may skip as many steps before it has found its scale


def _without_native_function(module: nn.Module, sites: ObservedSites) -> None:
    """Return ``None``."""


class ForwardHooks:
    """Reports forwards to the tracker, and records what modules receive and return.

    Parameters
    ----------
    context : HookContext
    backward : BackwardHooks
        Reports which forwards a backward reaches.
    gradients : LayerGradientHooks
        Observes the gradients of what modules return.
    loss : LossHooks
        Records the loss of models that return it.

    Attributes
    ----------
    root_begins_call : callable, optional
        Called at the beginning of each call of a root, with whether it is that of a compiled graph.
    root_has_begun : callable, optional
        Called when the call of a root has been reported.
    native_function : callable
        Returns the native function of the hook of a module with these sites, or ``None``.
    """

    def __init__(
        self, context: HookContext, backward: BackwardHooks, gradients: LayerGradientHooks, loss: LossHooks
    ) -> None:
        self.context = context
        self._backward = backward
        self._gradients = gradients
        self._loss = loss
        self.root_begins_call: Callable[[bool], None] | None = None
        self.root_has_begun: Callable[[], None] | None = None
        self.native_function: Callable[[nn.Module, ObservedSites], Function | None] = _without_native_function
        self._warned = False
        self._first_values = list[Tensor]()

    # -- roots ----------------------------------------------------------------------------------------------------

    def root_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of a root's call.

        A recomputation in a backward counts only in a reentrant checkpoint around the root, whose first forward has no gradients.
        """
        context = self.context
        tracker, thread = context.tracker, get_ident()
        if graph_task() != -1 and (tracker.forwards.latest is not None or not in_reentrant_checkpoint()):
            return
        if self.root_begins_call is not None:
            self.root_begins_call(False)
        # the count includes this call
        calls, stages = tracker.calls[thread].running, context.model.stages
        depth = count_running_calls(context.model.callable) - 1 if calls else None
        is_dry = bool(stages) and id(module) in stages and in_dry_run()
        if is_dry:
            tracker.forward_begins(thread, depth=depth, is_dry=True)
        else:
            self.forward_begins(thread, module.training, torch.is_grad_enabled(), not depth, depth)
        if self.root_has_begun is not None:
            self.root_has_begun()
        if not is_dry:
            self._root_has_begun(module, args, kwargs, calls)

    def _root_has_begun(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], calls: Sequence[Forward | None]
    ) -> None:
        """Record what a root is called with, in a call that was reported."""
        context, stages = self.context, self.context.model.stages
        if (
            len(calls) == 1
            and (forward := calls[0]) is not None
            and not (stages and not context.model.takes_input(module))
        ):
            if "input_data" in context.recorder.plan.kinds:
                self._record_all("input_data", (args, kwargs) if kwargs else args, forward)
            if (objective := self._loss.objective) is not None:
                objective.model_called(args, kwargs)
            if context.observer is not None and context.tracker.pass_name == TRAINING:
                context.observer.model_called(args, kwargs)
        elif calls == [None] and context.events.is_apart and context.tracker.pass_name == TRAINING:
            self._record_evaluated(args, kwargs)
        if calls and (forward := calls[0]) is not None:
            if len(calls) == 1:
                forward.began = sequence_number()
                for x in (*args, *kwargs.values()):
                    if isinstance(x, Tensor) and x.requires_grad:
                        forward.of_inputs = True
            context.native.permit_outputs(context.recorder, forward)

    def _record_evaluated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a forward of an evaluation in the training loop."""
        recorder = self._loss.validation(False)
        if recorder.wants(site := self.context.sites("input_data")):
            for path, tensor in leaves((args, kwargs) if kwargs else args):
                recorder.receive(site, tensor, path)

    def forward_begins(
        self,
        thread: int,
        training: bool,
        gradients: bool,
        is_outermost: bool,
        depth: int | None = None,
        is_compiled: bool = False,
    ) -> None:
        """Report the beginning of a forward; a compiled graph in evaluation mode measures nothing, so it never counts."""
        context = self.context
        tracker, step = context.tracker, context.tracker.counters.next.global_step
        counted = gradients and (training or not is_compiled)
        if is_outermost:
            has_gradients = context.parameters.noted is not None or self._backward.running
            if has_gradients and tracker.counts(training, counted):
                self._backward.report_cleared()
            if tracker.pass_name == TRAINING:
                is_of_training = gradients or (training and context.model.estimates_statistics)
                context.events.forward(step, training, is_of_training)
        decisions = tracker.forward_begins(
            *(thread, training, counted),
            depth=depth,
            running=self._running() if tracker.state is State.STEPPING else (),
            is_compiled=is_compiled,
        )
        if decisions:
            context.apply(decisions)
        if not step and tracker.forwards_without_step == 1:
            self._first_values = self._some_values()
        if not step and tracker.forwards_without_step == _MANY:
            self.report_missing_steps()

    def report_missing_steps(self) -> None:
        """Report once that there were many forwards in training, and no step, with what the process holds in place of one."""
        count = self.context.tracker.forwards_without_step
        if count > _FEW and not self._warned:
            self._warned = True
            backward = "Backward passes" if self._backward.has_accumulated else "No backward pass"
            verb = "have" if self._backward.has_accumulated else "has"
            known, advice = self._found_in_place_of_step()
            moves = not all(map(torch.equal, self._first_values, self._some_values()))
            trained = "Something else has changed its parameters." if moves else "The model is not trained."
            detail = f"{trained} {backward} {verb} given gradients to its parameters. {known}"
            at_most = "info" if moves else "error"
            self.context.found(MISSING_STEP.found(count, detail=detail, advice=advice, at_most=at_most))

    def _some_values(self) -> list[Tensor]:
        """Return copies of the first elements of some parameters, of those that are sharded of this rank's part."""
        chosen = [named.parameter for named in self.context.parameters.all if named.parameter.requires_grad][-_SAMPLE:]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in chosen if not is_lazy(each)]
        dense = [each.detach() for each in local if each.layout is torch.strided and has_storage(each)]
        copies = list[Tensor]()
        with suppressed(torch.OutOfMemoryError, MemoryError):
            copies += [each.reshape(-1)[:_SAMPLE].clone() for each in dense]
        return copies

    def report_no_batch(self) -> None:
        """Report that the program ends without any forward, if an optimizer has parameters of the model."""
        context = self.context
        has_begun = context.tracker.counters.next.global_step > 0 or context.events.has_forwards
        if not has_begun and context.parameters.optimizers():
            context.found(NO_BATCH.found())

    def _found_in_place_of_step(self) -> tuple[str, str]:
        """Return what is known of gradient scalers and optimizers that live and have not made a step, and what to try."""
        parameters = self.context.parameters
        owning = [type(optimizer).__name__ for optimizer in parameters.optimizers()]
        others = [type(optimizer).__name__ for optimizer in parameters.optimizers_of_others()]
        if scalers := _used_scalers():
            scale, first = scalers[0].get_scale(), scalers[0]._init_scale
            known = f"has fallen from {first:g} to {scale:g}" if scale < first else f"is {scale:g}"
            return (
                f"A gradient scaler is used, which skips the step if a gradient is NaN or infinite: its scale {known}.",
                "call scaler.step(optimizer) and scaler.update(), which alone changes the scale; search for what makes gradients overflow",
            )
        if owning:
            return (
                f"{listed(owning)} has parameters of the model, but its step() was not called or was skipped.",
                "call optimizer.step() after backward(), and check the condition it stands in",
            )
        if others:
            return (
                f"The optimizers that exist have parameters of other models or of a copy: {listed(others)}.",
                "create the optimizer with the parameters of this model, after it is complete; if only a part of the model was added, "
                "set the whole model with set_model()",
            )
        return "No optimizer of torch.optim exists.", ""

    def _running(self) -> list[int]:
        """Return the numbers of the optimizers that step on this thread."""
        return [self.context.parameters.number(optimizer) for optimizer in running_steps()[0]]

    def root_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Handle the end of a root's call; `output` is ``None`` if the call has raised."""
        context, thread = self.context, get_ident()
        calls = context.tracker.calls[thread].running
        if not calls or (graph_task() != -1 and not in_reentrant_checkpoint()):
            return
        if (forward := context.tracker.forward_ends(thread)) is None:
            if not calls:
                self._loss.root_ended(module, kwargs, output, None)
            return
        if not context.model.stages or context.model.returns_output(module):
            if "network_output" in context.recorder.plan.kinds:
                self._record_all("network_output", output, forward)
            if not isinstance(output, Tensor) or not torch.is_grad_enabled():
                self._loss.root_ended(module, kwargs, output, forward)
        is_counted = context.recorder.plan.counts_forwards
        if (is_counted or context.observer is not None) and torch.is_grad_enabled():
            outputs = [("", output)] if isinstance(output, Tensor) else leaves(output)
            if context.model.loss is not None:
                self._loss.owner.forward_ended(outputs, range(forward.began, sequence_number()))
            if is_counted:
                self._backward.arm(outputs, forward)

    def _record_all(self, kind: str, value: Any, forward: Forward) -> None:
        recorder = self.context.recorder
        if recorder.rows is not None:
            site = self.context.sites(kind)
            for path, tensor in leaves(value):
                recorder.receive(site, tensor, path, part=forward.part)

    # -- modules --------------------------------------------------------------------------------------------------

    def module_called(self, sites: ObservedSites, module: nn.Module, args: Any, output: Any) -> None:
        """Record what one call of a module receives and returns, and register hooks for the gradients of its outputs."""
        context = self.context
        tracker, thread = context.tracker, get_ident()
        if calls := tracker.calls[thread].running:
            forward, is_recomputed = calls[0], False
        elif graph_task() != -1:
            forward, is_recomputed = tracker.forwards.latest, True
        else:
            forward, is_recomputed = self.part_called(thread, module.training, output), False
        if forward is None or context.recorder.rows is None:  # hooks stay registered between steps
            return
        is_one = isinstance(output, Tensor)
        outputs, sizes = ([("", output)], None) if is_one else (leaves(output), batch_sizes(output))
        if not is_recomputed:
            self._record_call(sites, args, outputs, sizes, forward.part)
        if sites.gradients is not None:
            self._gradients.watch(sites.gradients, module, outputs, sizes, forward)
        if calls:
            context.native.permit_outputs(context.recorder, forward)

    def part_called(self, thread: int, training: bool, output: Any = None) -> Forward | None:
        """Handle the call of a module outside any root; return the forward that it belongs to."""
        context = self.context
        tracker, gradients = context.tracker, torch.is_grad_enabled()
        if context.model.is_compiled:
            return tracker.calls[thread].last
        if tracker.is_rootless and tracker.counts(training, gradients):
            self._backward.report_cleared()
        running = self._running() if tracker.state is State.STEPPING else ()
        forward, decisions = tracker.part_called(thread, training, gradients, running, context.computation.is_new())
        if decisions:
            context.apply(decisions)
        if forward is not None and gradients and self.context.recorder.plan.counts_forwards:
            self._backward.arm(leaves(output), forward)
        return forward

    def _record_call(self, sites: ObservedSites, args: Any, outputs: Leaves, sizes: Tensor | None, part: int) -> None:
        receive = self.context.recorder.receive
        if sites.inputs is not None:
            for path, tensor in received(args, outputs):
                receive(sites.inputs, tensor, path, part=part)
        if sites.outputs is not None:
            for path, tensor in outputs:
                own = sizes if not path else None
                receive(sites.outputs, tensor if own is None else with_batch_sizes(tensor, own), path, part=part)


def _used_scalers() -> list[torch.amp.GradScaler]:
    """Return the living gradient scalers that have scaled a loss."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
    return [scaler for scaler in found if scaler._scale is not None]
