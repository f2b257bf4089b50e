"""Observes gradients at the end of a backward, before the training loop clips them."""

import gc
import weakref

import torch
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import divided
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
        self._scalers: list[weakref.ref[torch.amp.GradScaler]] | None = None
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._is_known = False

    def backward_ended(self) -> None:
        """Record the gradients in place of those that an earlier backward of the step has left.

        Before the first step it is unknown which gradient scaler scales the loss.  Nothing is recorded then if any is in use.
        """
        context = self.context
        recorder = context.recorder
        if not recorder.plan.unclipped_gradients:
            return
        recorder.drop_part(UNCLIPPED_PART)
        if not self._is_known and any(scaler._scale is not None for scaler in self._all_scalers()):
            return
        context.parameters.refresh()
        scaler = self._scaler() if self._scaler is not None else None
        scale = None if scaler is None else scaler._scale
        for named in context.parameters.all:
            kind = "bias_gradients_unclipped" if named.is_bias else "weight_gradients_unclipped"
            site = context.sites(kind, named.module)
            if (grad := named.parameter.grad) is not None and recorder.wants(site):
                if scale is not None:
                    grad = divided(grad, scale)
                recorder.receive(site, grad, named.path, part=UNCLIPPED_PART)

    def optimizer_began(self, optimizer: Optimizer) -> None:
        """Find out which gradient scaler calls the optimizer."""
        if not self.context.recorder.plan.unclipped_gradients:
            return
        handling = (scaler for scaler in self._all_scalers() if _handles(scaler, optimizer))
        scaler = next(handling, None)
        if scaler is not None and (self._scaler is None or self._scaler() is not scaler):
            self.context.recorder.drop_part(UNCLIPPED_PART)  # recorded without its scale
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._is_known = True

    def _all_scalers(self) -> "list[torch.amp.GradScaler]":
        """Return the gradient scalers that existed when they were first needed, and are enabled."""
        if self._scalers is None:
            found = (x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler))
            self._scalers = [weakref.ref(scaler) for scaler in found]
        alive = (reference() for reference in self._scalers)
        return [scaler for scaler in alive if scaler is not None and scaler.is_enabled()]


def _handles(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has unscaled the gradients of an optimizer since its last update, or calls its step."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return state is not None and bool(state["found_inf_per_device"])
