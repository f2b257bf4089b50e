"""Observes what each backward adds to the gradients of parameters."""

from typing import Any

from torch import Tensor

from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.hook import Hook
from ikkuna.export.messages.stamp import TRAINING
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.forward import MICRO_PART

__all__ = ["MicroGradientHooks"]


class MicroGradientHooks:
    """Records the gradients of one micro-batch, before autograd adds them to those of the others.

    They are as autograd has computed them: scaled like the loss, not clipped, and of this process alone.

    Parameters
    ----------
    context : HookContext
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self._hooked: list[tuple[Any, Any]] = []  # nodes and handles; a node has hooks only as long as it lives

    def step_opened(self) -> None:
        """Register hooks for the parameters whose micro-batch gradients a subscriber wants."""
        context = self.context
        if not context.recorder.plan.micro_gradients:
            return
        for named in context.parameters.all:
            site = context.sites("bias_micro_gradients" if named.is_bias else "weight_micro_gradients", named.module)
            if not (named.parameter.requires_grad and context.recorder.wants(site)):
                continue
            # a hook on the parameter itself would also report gradients that are only returned to the user
            if (node := context.parameters.accumulate_node(named.parameter)) is not None:
                hook = Hook(self, MicroGradientHooks.gradient_computed, site, named.path)
                self._hooked.append((node, node.register_prehook(hook)))

    def gradient_computed(self, site: Site, path: str, grads: tuple[Tensor | None, ...]) -> None:
        """Record a gradient that is about to be added."""
        context = self.context
        if grads[0] is not None and context.tracker.pass_name == TRAINING and not context.is_off:
            context.recorder.receive(site, grads[0], path, part=MICRO_PART)

    def step_ended(self) -> None:
        """Remove the hooks."""
        hooked, self._hooked = self._hooked, []
        for _, handle in hooked:
            handle.remove()
