"""Registers the few hooks that stay while an exporter is open."""

import os
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.fast_path import FastPathHooks
from ikkuna.export.hooks.forward import ForwardHooks
from ikkuna.export.hooks.hook import Hook, Remove, remove_all
from ikkuna.export.hooks.in_graph import GraphSwitch, RootBeginsHook, RootEndsHook
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.export.hooks.optimizer_steps import StepHooks, call_at_steps
from ikkuna.export.hooks.optimizers import OptimizerHooks

__all__ = ["PermanentHooks", "pause_after_fork"]


class PermanentHooks:
    """Two hooks on each root, one on the loss module, and two that are called at the steps of all optimizers.

    Parameters
    ----------
    forward : ForwardHooks
        Handles the calls of roots.
    losses : LossHooks
        Handles the calls of the loss module.
    optimizers : OptimizerHooks
        Handles the steps of optimizers.
    fast_paths : FastPathHooks
        Keeps the hooks from changing what transformer layers compute.
    switch : GraphSwitch, optional
        What hooks in a compiled graph read.
    """

    def __init__(
        self,
        forward: ForwardHooks,
        losses: LossHooks,
        optimizers: OptimizerHooks,
        fast_paths: FastPathHooks,
        switch: GraphSwitch | None,
    ) -> None:
        self._forward = forward
        self._losses = losses
        self._fast_paths = fast_paths
        self._optimizers = optimizers
        self._switch = switch
        self._remove: list[Remove] = []

    def install(self, roots: Collection[nn.Module], loss: nn.Module | None, keeps: object = None) -> None:
        """Register the hooks, in place of those registered before; the roots keep the object `keeps` alive."""
        self.remove()
        self._fast_paths.find(roots)
        for root in roots:
            begins = RootBeginsHook(self._forward, ForwardHooks.root_begins, self._switch)
            begins.keeps = keeps
            ends = RootEndsHook(self._forward, ForwardHooks.root_ends, self._switch)
            handles: list[Any] = [
                root.register_forward_pre_hook(begins, with_kwargs=True),
                root.register_forward_hook(ends, with_kwargs=True, always_call=True),
            ]
            if (guard := self._fast_paths.guard(root)) is not None:
                handles.append(guard)
            self._remove.append(remove_all(handles))
        if loss is not None:
            hook = Hook(self._losses, LossHooks.loss_called)
            self._remove.append(remove_all([loss.register_forward_hook(hook, with_kwargs=True)]))
        self._remove.append(_install_for_optimizers(self._optimizers))

    def remove(self) -> None:
        """Remove the hooks."""
        remove, self._remove = self._remove, []
        for each in remove:
            each()


def _install_for_optimizers(optimizers: OptimizerHooks) -> Remove:
    """Call hooks before and after the step of any optimizer, at most until `optimizers` dies."""
    begins, ends = Hook(optimizers, OptimizerHooks.optimizer_begins), Hook(optimizers, OptimizerHooks.optimizer_ends)
    return weakref.finalize(optimizers, call_at_steps(StepHooks(begins, ends)))


def pause_after_fork(context: HookContext) -> None:
    """Suspend recording in a forked child, where a data loader may call the model."""
    reference = weakref.ref(context)

    def pause() -> None:
        if (alive := reference()) is not None:
            alive.is_paused = True

    os.register_at_fork(after_in_child=pause)
