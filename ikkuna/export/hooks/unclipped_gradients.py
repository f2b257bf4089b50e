"""Observes gradients at the end of a backward, before the training loop clips them."""

import gc

import torch
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import distribute_like, local_tensor
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.steps.step_tracker import UNCLIPPED_PART, Restarted

__all__ = ["UnclippedGradientHooks"]


class UnclippedGradientHooks:
    """Records the gradients of a step before clipping, reduced over ranks, and without the factor of a gradient scaler.

    Parameters
    ----------
    context : HookContext
    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self._scalers: list[torch.amp.GradScaler] | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._used: torch.amp.GradScaler | None = None
        self._is_known = False

    def backward_ended(self) -> None:
        """Record the gradients in place of those that an earlier backward of the step has left."""
        context = self.context
        recorder = context.recorder
        if not recorder.plan.unclipped_gradients:
            return
        context.apply((Restarted((UNCLIPPED_PART,)),))
        self._used = self._scaler if self._is_known else self._only_scaler()
        scale = None if self._used is None else self._used._scale
        for named in context.parameters.all:
            kind = "bias_gradients_unclipped" if named.is_bias else "weight_gradients_unclipped"
            site = context.sites(kind, named.module)
            if (grad := named.parameter.grad) is not None and recorder.wants(site):
                if scale is not None:
                    grad = distribute_like(local_tensor(grad) / scale, grad)
                recorder.receive(site, grad, named.path, part=UNCLIPPED_PART)

    def optimizer_began(self, optimizer: Optimizer) -> None:
        """Find out which gradient scaler calls the optimizer; drop what was recorded with the scale of another one."""
        if not self.context.recorder.plan.unclipped_gradients:
            return
        self._scaler = next((scaler for scaler in self._all_scalers() if _handles(scaler, optimizer)), None)
        self._is_known = True
        if self._scaler is not self._used:
            self.context.apply((Restarted((UNCLIPPED_PART,)),))

    def _only_scaler(self) -> "torch.amp.GradScaler | None":
        """Return the gradient scaler of this process, if exactly one is in use."""
        used = [scaler for scaler in self._all_scalers() if scaler.is_enabled() and scaler._scale is not None]
        return used[0] if len(used) == 1 else None

    def _all_scalers(self) -> "list[torch.amp.GradScaler]":
        """Return the gradient scalers that existed when they were first needed."""
        if self._scalers is None:
            self._scalers = [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]
        return self._scalers


def _handles(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether a gradient scaler has unscaled the gradients of an optimizer since its last update, or calls its step."""
    state = scaler._per_optimizer_states.get(id(optimizer)) if scaler.is_enabled() else None
    return state is not None and bool(state["found_inf_per_device"])
