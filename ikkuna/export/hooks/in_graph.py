"""Hooks that also work in compiled graphs, where they add the operators that measure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.export.hooks.graph_operators import BASE, VIEW, observe, root_called
from ikkuna.export.hooks.hook import Hook
from ikkuna.export.hooks.nested_tensors import leaves, received
from ikkuna.export.rows.site import Site

__all__ = ["GraphSwitch", "ModuleHook", "ModuleSites", "RootBeginsHook", "RootEndsHook"]


@dataclass(slots=True)
class GraphSwitch:
    """What hooks in a graph read at every call; the compiler makes one graph for each combination of values.

    Parameters
    ----------
    on : bool
        Whether the next step is sampled.
    root : int
        The slot to which a compiled root reports its calls.
    inputs, outputs : int
        Slots of what a root receives and returns; -1 if no subscriber wants it.
    backward : int
        The slot to which the backward of a compiled root is reported.
    """

    on: bool = False
    root: int = -1
    inputs: int = -1
    outputs: int = -1
    backward: int = -1


class ModuleSites(NamedTuple):
    """The sites of one module's tensors; ``None`` if no subscriber wants them."""

    inputs: Site | None = None
    activations: Site | None = None
    gradients: Site | None = None


class ModuleHook(Hook):
    """The forward hook of an observed module."""

    __slots__ = ("sites", "slots", "switch")

    def __init__(
        self,
        owner: Any = None,
        function: Callable[..., object] | None = None,
        sites: ModuleSites | None = None,
        switch: GraphSwitch | None = None,
    ) -> None:
        self.sites = sites or ModuleSites()
        self.slots = tuple(None if site is None else site.slot for site in self.sites)
        super().__init__(owner, function, self.sites)
        self.switch = switch

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that observe what the module receives and returns, and the gradient."""
        if torch.is_grad_enabled() and self.switch is not None and self.switch.on and not torch.compiler.is_exporting():
            inputs, activations, gradients = self.slots
            outputs = leaves(args[2])
            if inputs is not None:
                for path, tensor in received(args[1], outputs):
                    observe(tensor.detach(), inputs, path)
            for path, tensor in outputs:
                if activations is not None:
                    observe(tensor.detach(), activations, path)
                if gradients is not None and tensor.requires_grad:
                    _register_in_graph(tensor, gradients, path)


class RootBeginsHook(Hook):
    """The forward pre-hook of a root."""

    __slots__ = ("switch",)

    def __init__(
        self, owner: Any = None, function: Callable[..., object] | None = None, switch: GraphSwitch | None = None
    ) -> None:
        super().__init__(owner, function)
        self.switch = switch

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that report the call and observe what the root receives."""
        switch = self.switch
        if switch is not None and not torch.compiler.is_exporting():
            counts = args[0].training and torch.is_grad_enabled()
            root_called(switch.root, counts)
            if switch.on and counts and switch.inputs >= 0:
                for path, tensor in leaves((args[1], args[2]) if args[2] else args[1]):
                    observe(tensor.detach(), switch.inputs, path)


class RootEndsHook(RootBeginsHook):
    """The forward hook of a root."""

    __slots__ = ()

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that observe what the root returns, and report a backward through it."""
        switch = self.switch
        if switch is not None and not torch.compiler.is_exporting():
            counts = args[0].training and torch.is_grad_enabled()
            if switch.on and counts:
                outputs = leaves(args[2])
                for path, tensor in outputs:
                    if switch.outputs >= 0:
                        observe(tensor.detach(), switch.outputs, path)
                    if switch.backward >= 0 and tensor.requires_grad:
                        _report_backward(tensor, switch.backward)
                        break


def _report_backward(output: Tensor, slot: int) -> None:
    output.register_hook(lambda grad: observe(grad.detach(), slot, ""))


def _register_in_graph(output: Tensor, slot: int, path: str) -> None:
    """Add operators that observe the gradient of `output`, or of its base if an in-place operation follows on a view."""
    base = output._base
    if base is None or not base.requires_grad or base.numel() != output.numel():
        output.register_hook(lambda grad: observe(grad.detach(), slot, path))
        return
    size, stride = output.size(), output.stride()
    output.register_hook(lambda grad: observe(grad.detach(), slot + VIEW, path))
    base.register_hook(lambda grad: observe(grad.detach().contiguous().as_strided(size, stride), slot + BASE, path))
