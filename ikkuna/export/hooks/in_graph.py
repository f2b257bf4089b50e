"""Hooks that also work in compiled graphs, where they add the operators that measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.hooks.graph_operators import (
    BASE,
    GRADIENTS,
    INPUTS,
    OUTPUTS,
    VIEW,
    ObservedSites,
    next_call,
    observe,
    root_called,
)
from ikkuna.export.hooks.hook import Hook
from ikkuna.export.hooks.nested_tensors import leaves, received
from ikkuna.numerics.statistics.native.hook_functions import Function
from ikkuna.torch_internals import skip_in_compiler

__all__ = ["GraphSwitch", "ModuleHook", "RootBeginsHook", "RootEndsHook"]


@dataclass(slots=True)
class GraphSwitch:
    """Values that hooks in a graph read at every call; the compiler makes one graph for each combination of values.

    Parameters
    ----------
    on : bool
        Whether the next step is sampled.
    root : Tensor, optional
        The number of the network, to which a compiled root reports its calls and backwards.
    inputs, outputs : bool
        Whether a subscriber wants what a root receives and returns.
    loss : bool
        Whether the loss of the next step is sampled, which the backward through a root shows.
    """

    on: bool = False
    root: Tensor | None = None
    inputs: bool = False
    outputs: bool = False
    loss: bool = False


class ModuleHook(Hook):
    """The forward hook of an observed module.

    Its owner has a method ``native_function`` that returns a function of the output.  That does what the hook would do, if it is permitted,
    and returns whether it was.  It is made at the first call, because the registration of subscribers changes the sites several times.

    Parameters
    ----------
    owner : object, optional
        The adapter; see `Hook`.
    function : callable, optional
        An unbound method of the adapter, which receives the sites first.
    sites : ObservedSites
        The sites of the module.
    number : Tensor, optional
        The number of the sites in compiled graphs.
    switch : GraphSwitch, optional
        ``None`` if compiled models are not measured in their graphs.
    """

    __slots__ = ("_is_new", "_native", "number", "sites", "switch", "wants")

    def __init__(
        self,
        owner: Any = None,
        function: Callable[..., object] | None = None,
        sites: ObservedSites | None = None,
        number: Tensor | None = None,
        switch: GraphSwitch | None = None,
    ) -> None:
        super().__init__(owner, function)
        self.switch = switch
        self.observe(sites or ObservedSites(), number)

    def observe(self, sites: ObservedSites, number: Tensor | None) -> None:
        """Observe other tensors of the module from now on."""
        self.sites, self.bound = sites, (sites,)
        self.wants = tuple(site is not None for site in sites)
        self.number = number
        self._native: Function | None = None
        self._is_new = True

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        """Record a call of the module."""
        if torch.compiler.is_compiling():
            self.leave_in_graph(module, args, output)
        elif self._native is None or not self._native(output):
            Hook.__call__(self, module, args, output)
            if self._is_new and (owner := self.owner()) is not None:
                self._is_new = False
                try:
                    self._native = owner.native_function(module, self.sites)
                except Exception as error:
                    owner.context.handle("creating the native function of a hook", error)

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that observe what the module receives and returns, and the gradient."""
        # the switch is read last, so that a graph without gradients does not depend on it
        if not torch.is_grad_enabled() or torch.compiler.is_exporting() or (number := self.number) is None:
            return
        if self.switch is not None and self.switch.on:
            inputs, activations, gradients = self.wants
            outputs = leaves(args[2])
            if inputs:
                for path, tensor in received(args[1], outputs):
                    observe(tensor.detach(), number, INPUTS, path, next_call())
            for path, tensor in outputs:
                if activations:
                    observe(tensor.detach(), number, OUTPUTS, path, next_call())
                if gradients and tensor.requires_grad:
                    _register_in_graph(tensor, number, path)


skip_in_compiler(ModuleHook.__call__)


class RootBeginsHook(Hook):
    """The forward pre-hook of a root; its attribute `keeps` is an object that lives as long as the root, or the hook."""

    __slots__ = ("keeps", "switch")

    def __init__(
        self, owner: Any = None, function: Callable[..., object] | None = None, switch: GraphSwitch | None = None
    ) -> None:
        super().__init__(owner, function)
        self.switch = switch
        self.keeps: object = None

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that report the call and observe what the root receives."""
        switch = self.switch
        if switch is None or (root := switch.root) is None or torch.compiler.is_exporting():
            return
        counts = args[0].training and torch.is_grad_enabled()
        root_called(root, counts, next_call())
        if counts and switch.on and switch.inputs:
            for path, tensor in leaves((args[1], args[2]) if args[2] else args[1]):
                observe(tensor.detach(), root, INPUTS, path, next_call())


class RootEndsHook(RootBeginsHook):
    """The forward hook of a root."""

    __slots__ = ()

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that observe what the root returns, and report a backward through it."""
        switch = self.switch
        if switch is None or (root := switch.root) is None or torch.compiler.is_exporting():
            return
        if args[0].training and torch.is_grad_enabled() and (switch.on or switch.loss):
            outputs = leaves(args[3])
            if switch.on and switch.outputs:
                for path, tensor in outputs:
                    observe(tensor.detach(), root, OUTPUTS, path, next_call())
            for _, tensor in outputs:
                if tensor.requires_grad:
                    _report_gradient(tensor, root, GRADIENTS, "")
                    break


def _report_gradient(tensor: Tensor, number: Tensor, role: int, path: str) -> None:
    call = next_call()
    tensor.register_hook(lambda grad: observe(grad.detach(), number, role, path, call))


def _register_in_graph(output: Tensor, number: Tensor, path: str) -> None:
    """Add operators that observe the gradient of `output`, or of its base if an in-place operation follows on a view."""
    base = output._base
    if base is None or not base.requires_grad or base.numel() != output.numel():
        _report_gradient(output, number, GRADIENTS, path)
        return
    size, stride, call = output.size(), output.stride(), next_call()
    _report_gradient(output, number, VIEW, path)
    base.register_hook(
        lambda grad: observe(grad.detach().contiguous().as_strided(size, stride), number, BASE, path, call)
    )
