"""Observes gradients at the end of a backward, before the training loop clips them."""

from ikkuna.export.hooks.context import HookContext
from ikkuna.export.steps.forward import UNCLIPPED_PART

__all__ = ["UnclippedGradientHooks"]


class UnclippedGradientHooks:
    """Records the gradients of a step before clipping, reduced over ranks, and without the factor of a gradient scaler.

    Parameters
    ----------
    context : HookContext
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context

    def backward_ended(self) -> None:
        """Record the gradients in place of those that an earlier backward of the step has left."""
        context = self.context
        recorder = context.recorder
        if not recorder.plan.unclipped_gradients:
            return
        recorder.drop_part(UNCLIPPED_PART)
        context.parameters.refresh()
        for named in context.parameters.all:
            kind = "bias_gradients_unclipped" if named.is_bias else "weight_gradients_unclipped"
            site = context.sites(kind, named.module)
            if (grad := named.parameter.grad) is not None and recorder.wants(site):
                recorder.receive(site, context.loss_scale.removed_from(grad), named.path, part=UNCLIPPED_PART)
