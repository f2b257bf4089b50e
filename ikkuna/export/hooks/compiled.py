"""Handles what compiled graphs report and measure."""

from collections import Counter
from threading import get_ident

from torch import Tensor

from ikkuna.distributed.dtensor import divided
from ikkuna.export.hooks.backward import BackwardHooks
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.forward import ForwardHooks
from ikkuna.export.hooks.graph_operators import BASE, VIEW
from ikkuna.export.hooks.hook import in_backward
from ikkuna.export.hooks.modules import BACKWARD, ModuleHooks
from ikkuna.export.rows.site import Site

__all__ = ["CompiledHooks"]


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
    """

    def __init__(
        self, context: HookContext, forward: ForwardHooks, backward: BackwardHooks, modules: ModuleHooks
    ) -> None:
        self.context = context
        self._forward = forward
        self._backward = backward
        self._modules = modules
        self._views: Counter[tuple[Site, str]] = Counter()

    def root_called(self, counts: bool) -> None:
        """Handle the call of a compiled root; `counts` if it is in training mode with gradients."""
        context = self.context
        try:
            try:
                context.stopwatch.start()
                context.native.close()
                if (not context.is_off or context.resumes(running=1)) and not in_backward():
                    self._modules.settle(True)
                    self._forward.forward_begins(get_ident(), counts, counts, is_compiled=True)
            finally:
                context.stopwatch.stop()
        except BaseException as error:
            context.handle("the call of a compiled root", error)

    def observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        """Record a tensor, or the gradient of one."""
        context = self.context
        try:
            try:
                context.stopwatch.start()
                context.native.close()
                if not context.is_off:
                    self._observed(site, tensor, path, role)
            finally:
                context.stopwatch.stop()
        except BaseException as error:
            context.handle(f"the measurement of {site}", error)

    def _observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        if site.kind == BACKWARD:
            if (forward := self.context.tracker.latest_compiled) is not None:
                self._backward.reach(forward)
            return
        self._modules.was_traced(site.module)
        if site.kind == "layer_gradients":
            self._record_gradient(site, tensor, path, role)
        elif not in_backward():
            thread = get_ident()
            calls = self.context.tracker.calls.of(thread)
            forward = calls[0] if calls else self._forward.part_called(thread, True)
            if forward is not None and self.context.recorder.rows is not None:
                self.context.recorder.receive(site, tensor, path, part=forward.part)

    def _record_gradient(self, site: Site, grad: Tensor, path: str, role: int) -> None:
        context = self.context
        part = self._backward.reach_latest()
        if part is None or context.recorder.rows is None or (role and not self._is_first(site, path, role)):
            return
        if context.loss_scale.is_used:
            grad = context.loss_scale.removed_from(grad)
        if context.replicas > 1:
            grad = divided(grad, context.replicas)
        context.recorder.receive(site, grad, path, part=part)

    def _is_first(self, site: Site, path: str, role: int) -> bool:
        """Whether a gradient is not the repetition, at the base of a view, of one that the view itself has reported."""
        if role == VIEW:
            self._views[site, path] += 1
        elif role == BASE and self._views[site, path]:
            self._views[site, path] -= 1
            return False
        return True

    def step_ended(self) -> None:
        """Forget which views have reported a gradient."""
        self._views.clear()
