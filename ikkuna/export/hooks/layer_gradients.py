"""Observes the gradients of the loss with respect to what modules return."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ikkuna.distributed.dtensor import divided
from ikkuna.export.hooks.backward import BackwardHooks
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.hook import Hook
from ikkuna.export.hooks.nested_tensors import Leaves, with_batch_sizes
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.forward import Forward

__all__ = ["LayerGradientHooks"]

_CACHED = 8  # forwards of a step whose hooks serve the next steps, too


class LayerGradientHooks:
    """Registers hooks on the outputs of modules, and records the gradients that they report.

    Parameters
    ----------
    context : HookContext
    backward : BackwardHooks
        Recognises which backward is running.
    """

    def __init__(self, context: HookContext, backward: BackwardHooks) -> None:
        self.context = context
        self._backward = backward
        self._hooks: dict[Forward, dict[tuple[Site, str], Hook]] = {}
        self._lasting: list[Any] = []

    def watch(self, site: Site, outputs: Leaves, sizes: Tensor | None, forward: Forward) -> None:
        """Register hooks on the outputs of one call of a module; `sizes` are those of a packed sequence."""
        for path, output in outputs:
            if output.requires_grad:
                hook = self._hook(site, path, None if path else sizes, forward)
                base = output._base
                if base is None:
                    handle = output.register_hook(hook)
                    if output.is_leaf:
                        self._lasting.append(handle)
                else:
                    self._lasting += _register_on_view(output, base, hook, outputs)

    def _hook(self, site: Site, path: str, sizes: Tensor | None, forward: Forward) -> Hook:
        hooks = self._hooks.get(forward)
        if hooks is None:
            hooks = {}
            if len(self._hooks) < _CACHED:
                self._hooks[forward] = hooks
        if sizes is not None:
            return Hook(self, LayerGradientHooks.gradient_computed, site, path, sizes, forward)
        hook = hooks.get((site, path))
        if hook is None:
            hook = hooks[site, path] = Hook(self, LayerGradientHooks.gradient_computed, site, path, None, forward)
        return hook

    def gradient_computed(self, site: Site, path: str, sizes: Tensor | None, forward: Forward, grad: Tensor) -> None:
        """Record a gradient."""
        context = self.context
        recorder = context.recorder
        if recorder.rows is None or context.is_off:
            return
        part = self._backward.reach(forward)
        if context.loss_scale.is_used:
            grad = context.loss_scale.removed_from(grad)
        if context.replicas > 1:
            grad = divided(grad, context.replicas)  # the loss is the mean of the ranks' losses
        recorder.receive(site, with_batch_sizes(grad, sizes), path, part=part)

    def step_ended(self) -> None:
        """Remove the hooks that would outlive a backward."""
        lasting, self._lasting = self._lasting, []
        for handle in lasting:
            handle.remove()


class _ViewGradient:
    """Receives the gradient of an output that is a view, from the view or from its base.

    An in-place operation on a view cuts the view's own hook off without an error; its gradient then arrives at the base.
    """

    __slots__ = ("computed", "has_come", "size", "stride", "version", "view")

    def __init__(self, view: Tensor, computed: Callable[[Tensor], None]) -> None:
        self.computed = computed
        self.has_come = False
        self.view = weakref.ref(view)
        self.version = view._version
        self.size, self.stride = view.size(), view.stride()

    def of_view(self, grad: Tensor) -> None:
        self.has_come = True
        self.computed(grad)

    def of_base(self, grad: Tensor) -> None:
        view = self.view()
        if not self.has_come and (view is None or view._version != self.version):
            self.computed(grad.detach().contiguous().as_strided(self.size, self.stride))


def _register_on_view(view: Tensor, base: Tensor, computed: Callable[[Tensor], None], outputs: Leaves) -> list[Any]:
    """Register hooks on a view and on its base; return the handles of those that would outlive the graph."""
    is_output = any(base is other for _, other in outputs)
    if is_output or not base.requires_grad or base.numel() != view.numel():
        handle = view.register_hook(computed)
        return [handle] if view.is_leaf else []
    gradient = _ViewGradient(view, computed)
    handles = [view.register_hook(gradient.of_view), base.register_hook(gradient.of_base)]
    return handles if base.is_leaf else []
