"""Composes and registers all adapters of torch's hooks of an exporter."""

import weakref
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from ikkuna.observation.hooks.backward import BackwardHooks
from ikkuna.observation.hooks.context import BASE, VIEW, HookContext
from ikkuna.observation.hooks.fast_path import FastPathHooks
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.gradients import LayerGradientHooks, MicroGradientHooks
from ikkuna.observation.hooks.hook import Hook, HookFreeCopies, Remove, in_backward, remove_all
from ikkuna.observation.hooks.in_graph import RootBeginsHook, RootEndsHook
from ikkuna.observation.hooks.loss import LossHooks
from ikkuna.observation.hooks.modules import BACKWARD, ModuleHooks
from ikkuna.observation.hooks.observed import ObservedHooks
from ikkuna.observation.hooks.optimizers import CallsEach, OptimizerHooks, call_at_steps
from ikkuna.observation.rows.plan import Site


def _install_for_optimizers(optimizers: OptimizerHooks) -> Remove:
    """Call hooks before and after the step of any optimizer, at most until `optimizers` dies."""
    begins, ends = Hook(optimizers, OptimizerHooks.optimizer_begins), Hook(optimizers, OptimizerHooks.optimizer_ends)
    optimizers.context.native.call_natively(CallsEach, has_several=True)
    remove = call_at_steps(begins.counted(), ends.counted())
    at_end = weakref.finalize(optimizers, remove)

    def remove_now() -> None:
        remove()  # a finalizer cannot be called again after an interruption
        at_end.detach()

    return remove_now


class CompiledHooks:
    """Translates the operators in compiled graphs into calls of the tracker and the recorder.

    Parameters
    ----------
    context : HookContext
    forward : ForwardHooks
        Handles forwards.
    backward : BackwardHooks
        Handles backwards.
    modules : ModuleHooks
        Registers the hooks that have added the operators.

    Attributes
    ----------
    views : Counter
        Which views have reported a gradient in this step.
    """

    def __init__(
        self, context: HookContext, forward: ForwardHooks, backward: BackwardHooks, modules: ModuleHooks
    ) -> None:
        self.context = context
        self._forward = forward
        self._backward = backward
        self._modules = modules
        self.views: Counter[tuple[Site, str]] = Counter()

    def root_called(self, training: bool, gradients: bool) -> None:
        """Handle the call of a compiled root in a mode, with or without gradients."""
        self._call("the call of a compiled root", self._root_called, training, gradients)

    def observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        """Record a tensor, or the gradient of one."""
        self._call(site, self._observed, site, tensor, path, role)

    def _call(self, what: object, function: Callable[..., None], *args: object) -> None:
        """Call a function, count its time, and handle its exceptions, as `Hook` does."""
        context = self.context
        try:
            try:
                context.stopwatch.start()
                context.native.close()
                function(*args)
            finally:
                context.stopwatch.stop()
        except BaseException as error:
            context.handle(f"the record of {what}", error)

    def _root_called(self, training: bool, gradients: bool) -> None:
        context = self.context
        if (not context.is_off or context.resumes(running=1)) and not in_backward():
            self._modules.settle(True)
            is_outermost = not context.tracker.calls[thread := get_ident()].running
            self._forward.forward_begins(thread, training, gradients, is_outermost, is_compiled=True)

    def _observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        if self.context.is_off:
            return
        if site.kind == BACKWARD:
            if (forward := self.context.tracker.forwards.latest_compiled) is not None:
                self._backward.reach(forward)
            return
        self._modules.was_traced(site.module)
        if site.kind == "layer_gradients":
            self._record_gradient(site, tensor, path, role)
        elif not in_backward():
            thread = get_ident()
            calls = self.context.tracker.calls[thread].running
            forward = calls[0] if calls else self._forward.part_called(thread, True)
            if forward is not None and self.context.recorder.rows is not None:
                self.context.recorder.receive(site, tensor, path, part=forward.part)

    def _record_gradient(self, site: Site, grad: Tensor, path: str, role: int) -> None:
        context = self.context
        part = self._backward.reach_latest()
        if part is None or context.recorder.rows is None or (role and not self._is_first(site, path, role)):
            return
        context.recorder.receive(site, context.averaged(grad), path, part=part)

    def _is_first(self, site: Site, path: str, role: int) -> bool:
        """Whether a gradient is not the repetition, at the base of a view, of one that the view itself has reported."""
        if role == VIEW:
            self.views[site, path] += 1
        elif role == BASE and self.views[site, path]:
            self.views[site, path] -= 1
            return False
        return True


class HookSet:
    """All adapters of torch's hooks of one exporter, which hooks refer to weakly.

    Parameters
    ----------
    context : HookContext
    in_graph : bool
        Whether compiled models are measured in their graphs.

    Attributes
    ----------
    forward : ForwardHooks
        Handles the calls of the model.
    gradients : LayerGradientHooks
        Observes the gradients of what modules return.
    losses : LossHooks
        Records the loss and the labels.
    modules : ModuleHooks
        The hooks of observed modules, which are registered only for the steps that need them.
    observed : ObservedHooks
        Records what the model passes to ``observe``.
    optimizers : OptimizerHooks
        Observes parameters around the steps of optimizers.
    """

    def __init__(self, context: HookContext, in_graph: bool) -> None:
        self._context = context
        self.losses = LossHooks(context)
        self.optimizers = OptimizerHooks(context, self.losses)
        self._backward = BackwardHooks(context, self.losses)
        self.gradients = LayerGradientHooks(context, self._backward)
        self._micro_gradients = MicroGradientHooks(context, self.optimizers.table)
        self._backward.ended.append(self.optimizers.table.unclipped_gradients)
        self.forward = ForwardHooks(context, self._backward, self.gradients, self.losses)
        self._fast_paths = FastPathHooks(context)
        self.observed = ObservedHooks(context, self.forward)
        self.modules = ModuleHooks(*(context, self.forward, self._fast_paths, self.observed, self.gradients), in_graph)
        self._compiled = CompiledHooks(context, self.forward, self._backward, self.modules)
        context.sites.set_receiver(self._compiled)
        self._remove: list[Remove] = []  # the hooks that stay
        self._copies = HookFreeCopies()

    def install(self, keeps: object) -> None:
        """Register the hooks that stay while the exporter is open; the roots keep the object `keeps` alive.

        These are two on each root, one on the loss module, and two that are called at the steps of all optimizers.
        """
        self._remove_permanent()
        model, switch = self._context.model, self.modules.switch
        self._fast_paths.find(model.callable)
        for root in model.callable:
            begins = RootBeginsHook(self.forward, ForwardHooks.root_begins, switch).counted()
            begins.keeps = keeps
            ends = RootEndsHook(self.forward, ForwardHooks.root_ends, switch).counted()
            handles: list[Any] = [
                root.register_forward_pre_hook(begins, with_kwargs=True),
                root.register_forward_hook(ends, with_kwargs=True, always_call=True),
            ]
            if (guard := self._fast_paths.guard(root)) is not None:
                handles.append(guard)
            self._remove.append(remove_all(handles))
        if model.loss is not None:
            hook = Hook(self.losses, LossHooks.loss_called).counted()
            self._remove.append(remove_all([model.loss.register_forward_hook(hook, with_kwargs=True)]))
        self._remove.append(_install_for_optimizers(self.optimizers))
        self.include_copies()

    def _remove_permanent(self) -> None:
        while self._remove:
            self._remove[-1]()
            self._remove.pop()

    def include_copies(self) -> None:
        """Keep the hooks out of copies of all modules that may have some."""
        model = self._context.model
        loss: tuple[nn.Module, ...] = () if model.loss is None else (model.loss,)
        self._copies.include((*model.callable, *loss, *(named.module for named in model.modules)))

    def uninstall(self) -> None:
        """Remove every hook; may be repeated after an interruption."""
        self._remove_permanent()
        self.modules.remove(everything=True)
        self.modules.remove_lost()
        self.losses.step_ended()
        self.observed.set_wanted(False)
        self._copies.remove()

    def step_opened(self) -> None:
        """Prepare for the step that has begun, and register the hooks of the modules that it samples."""
        plan, losses, modules = self._context.recorder.plan, self.losses, self.modules
        if plan.micro_gradients:
            self._micro_gradients.step_opened()
        if plan.parameters:
            self.optimizers.step_opened()
        if losses.is_looking or plan.together or "input_labels" in plan.kinds:
            losses.step_opened()
        if modules.sampled_for is not plan or modules.installed_for is not plan:
            self.install_modules()

    def install_modules(self) -> None:
        """Register the hooks of the modules that the open step or pass samples; those of compiled models are there already."""
        plan = self._context.recorder.plan
        if not self._context.model.is_compiled:
            self.modules.set_sampled(plan)
            self.modules.install(plan)

    def step_ended(self) -> None:
        """Forget everything about the step but the parameters."""
        self._backward.step_ended()
        if self.gradients.lasting:
            self.gradients.step_ended()
        if self._micro_gradients.is_used:
            self._micro_gradients.step_ended()
        self.losses.step_ended()
        self._compiled.views.clear()
        if self._fast_paths.calls:
            self._fast_paths.finish()
