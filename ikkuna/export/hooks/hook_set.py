"""Composes all adapters of torch's hooks of an exporter."""

from torch import nn

from ikkuna.export.hooks.backward import BackwardHooks
from ikkuna.export.hooks.compiled import CompiledHooks
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.copies import HookFreeCopies
from ikkuna.export.hooks.fast_path import FastPathHooks
from ikkuna.export.hooks.forward import ForwardHooks
from ikkuna.export.hooks.install import PermanentHooks
from ikkuna.export.hooks.layer_gradients import LayerGradientHooks
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.export.hooks.micro_gradients import MicroGradientHooks
from ikkuna.export.hooks.modules import ModuleHooks
from ikkuna.export.hooks.observed import ObservedHooks
from ikkuna.export.hooks.optimizers import OptimizerHooks
from ikkuna.export.hooks.unclipped_gradients import UnclippedGradientHooks

__all__ = ["HookSet"]


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
        self._micro_gradients = MicroGradientHooks(context)
        self._unclipped = UnclippedGradientHooks(context)
        self._backward.ended.append(self._unclipped.backward_ended)
        self.forward = ForwardHooks(context, self._backward, self.gradients, self.losses)
        self._fast_paths = FastPathHooks(context)
        self.observed = ObservedHooks(context, self.forward)
        self.modules = ModuleHooks(*(context, self.forward, self._fast_paths, self.observed, self.gradients), in_graph)
        self._compiled = CompiledHooks(context, self.forward, self._backward, self.modules)
        context.sites.set_receiver(self._compiled)
        self._permanent = PermanentHooks(
            self.forward, self.losses, self.optimizers, self._fast_paths, self.modules.switch
        )
        self._copies = HookFreeCopies()

    def install(self, keeps: object) -> None:
        """Register the hooks that stay while the exporter is open; the roots keep the object `keeps` alive."""
        model = self._context.model
        self._permanent.install(model.callable, model.loss, keeps=keeps)
        self.include_copies()

    def include_copies(self) -> None:
        """Keep the hooks out of copies of all modules that may have some."""
        model = self._context.model
        loss: tuple[nn.Module, ...] = () if model.loss is None else (model.loss,)
        self._copies.include((*model.callable, *loss, *(named.module for named in model.modules)))

    def uninstall(self) -> None:
        """Remove the hooks that stay while the exporter is open."""
        self._permanent.remove()
        self.observed.set_wanted(False)
        self._copies.remove()

    def step_opened(self) -> None:
        """Prepare for the step that has begun, and register the hooks of the modules that it samples."""
        self._micro_gradients.step_opened()
        self.optimizers.step_opened()
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
        self.gradients.step_ended()
        self._micro_gradients.step_ended()
        self.losses.step_ended()
        self._compiled.step_ended()
