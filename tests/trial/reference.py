"""The reference of a training with any number of optimizers; nothing here is of ikkuna."""

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.real_models.reference import Observation, Reference, wide

__all__ = ["TurnsReference"]


class TurnsReference(Reference):
    """Observes a model of which several optimizers may train parts.

    Each step of an optimizer is one, unless no module was called since the step of another optimizer: they share it.
    The outputs of modules belong to the next step.

    Parameters
    ----------
    model : nn.Module
        The model.
    """

    def __init__(self, model):
        super().__init__(model.module if isinstance(model, nn.DataParallel) else model, None)
        self.step = -1
        self._pending = []
        self._is_computed = False
        self._stepped = set()
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]

    def close(self):
        """Remove the hooks of optimizers, and return the number of steps."""
        for handle in self._handles:
            handle.remove()
        return self.step + 1

    def _output(self, name, output):
        if not torch.is_grad_enabled() or not self._model.training:
            return None
        self._is_computed = True
        is_traced = type(output) is not torch.Tensor
        return None if is_traced else super()._output(name, output)

    def _add(self, kind, series, tensor):
        if kind in ("activations", "layer_gradients"):
            self._pending.append((kind, series, wide(tensor)))
        else:
            super()._add(kind, series, tensor)

    def _begins(self, optimizer, args, kwargs):
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if owned.isdisjoint(map(id, self._model.parameters())):
            return
        is_first = self.step < 0
        if is_first or self._is_computed or id(optimizer) in self._stepped or _has_closure(args, kwargs):
            self.step += 1
            self._stepped.clear()
            self._before = {}
            for kind, series, _, parameter in self._parameters():
                self._add("weights" if kind == "weight" else "biases", series, parameter)
        self._is_computed = False
        self._stepped.add(id(optimizer))
        for kind, series, elements in self._pending:
            if elements.numel():
                self.seen.setdefault((kind, series, self.step), Observation()).parts.append(elements)
        self._pending.clear()
        for _, _, name, parameter in self._parameters():
            if id(parameter) in owned and parameter.requires_grad:
                self._before.setdefault(name, _copy(parameter))
        if not _has_closure(args, kwargs):
            self._add_gradients(owned)

    def _ends(self, optimizer, args, kwargs):
        if id(optimizer) not in self._stepped:
            return
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if _has_closure(args, kwargs):
            self._add_gradients(owned)
            self._pending.clear()
            self._is_computed = False
        for kind, series, name, parameter in self._parameters():
            if id(parameter) in owned and name in self._before:
                update = Observation([wide(_copy(parameter) - self._before[name])])
                self.seen[f"{kind}_updates", series, self.step] = update

    def _add_gradients(self, owned):
        for kind, series, _, parameter in self._parameters():
            if id(parameter) in owned and parameter.grad is not None:
                self.seen[f"{kind}_gradients", series, self.step] = Observation([wide(parameter.grad)])


def _copy(parameter):
    """Return a copy in float64; a complex parameter stays complex, since its update is the magnitude of a difference."""
    return parameter.detach().to(torch.complex128, copy=True) if parameter.is_complex() else wide(parameter)


def _has_closure(args, kwargs):
    """Return whether an optimizer's step was called with a closure; the first argument is the optimizer."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))
