"""Hooks that also work in compiled graphs, where they add the operators that measure."""

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, jit, nn

from ikkuna.numerics.statistics.native.hook_functions import Function
from ikkuna.observation.hooks.context import (
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
from ikkuna.observation.hooks.hook import Hook
from ikkuna.observation.hooks.nested_tensors import leaves, received
from ikkuna.support.torch_internals import (
    COMPILER_FRAMES,
    compiled_programs,
    drop_programs,
    is_traced_branch,
    skip_in_compiler,
)


class CompilerStance:
    """Sets the stance of ``torch.compile`` to ``"force_eager"``, and restores the user's choice.

    Examples
    --------
    >>> stance = CompilerStance()
    >>> stance.set_eager(True)
    >>> stance.set_eager(False)
    """

    def __init__(self) -> None:
        self._eager: AbstractContextManager[object] | None = None

    def set_eager(self, eager: bool) -> None:
        """Run compiled programs eagerly from now on, or no longer; a repeated call does nothing."""
        if eager and self._eager is None:
            self._eager = torch.compiler.set_stance("force_eager")
        elif not eager and self._eager is not None:
            stance, self._eager = self._eager, None
            stance.__exit__(None, None, None)


class CompiledModules:
    """Recognises modules that were compiled, by ``module.compile()`` or by a wrapper around them.

    The compiler keeps its programs with the code of ``forward``, so all instances of a class share them.
    A program alone therefore shows that an instance of the class was compiled; the instance has a compiled call of its own,
    or a wrapper refers to it, which only the garbage collector finds.
    A search is repeated only if the compiler has made further programs.
    """

    def __init__(self) -> None:
        self._searched: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def includes(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether one of the modules was compiled and called."""
        suspects = []
        counts: dict[type[nn.Module], int] = {}
        for module in modules:
            cls = type(module)
            if cls not in counts:
                counts[cls] = 0
                for code in _codes(module):
                    counts[cls] += len(compiled_programs(code))
            if not (count := counts[cls]):
                continue
            if module._compiled_call_impl is not None:
                return True
            if self._searched.get(module) != count:
                self._searched[module] = count
                suspects.append(module)
        if not suspects or not _have_wrapper(suspects):
            return False
        for module in suspects:
            self._searched.pop(module, None)
        return True

    def drop_programs_of_others(self, modules: Iterable[nn.Module]) -> None:
        """Drop the programs that other instances of the modules' classes have left.

        Otherwise a module that is compiled later could use one of them, which contains no measurement.
        """
        of_class = {type(module): module for module in modules}
        for code in {code for module in of_class.values() for code in _codes(module)}:
            if compiled_programs(code):
                drop_programs(code)


def _codes(module: nn.Module) -> list[CodeType]:
    """Return the code that may have programs of a module: its ``forward``, and a frame around all modules of torch."""
    if isinstance(module, jit.ScriptModule) or (code := getattr(type(module).forward, "__code__", None)) is None:
        return []
    frames: Any = sys.modules.get(COMPILER_FRAMES) if type(module).forward.__module__.startswith("torch.") else None
    return [code, frames.wrap_inline(len).__code__] if hasattr(frames, "wrap_inline") else [code]


def _have_wrapper(modules: list[nn.Module]) -> bool:
    """Return whether a wrapper of the compiler, which keeps its module as ``_orig_mod``, refers to one of the modules."""
    wrapped = (each.get("_orig_mod") for each in gc.get_referrers(*modules) if isinstance(each, dict))
    return any(found is module for found in wrapped if found is not None for module in modules)


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

    Its owner has a method ``native_function`` that returns a function of the arguments and the output.
    That does what the hook would do, if it is permitted, and returns whether it was.
    It is made at the first call, because the registration of subscribers changes the sites several times.

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
        elif self._native is None or not self._native(args, output):
            Hook.__call__(self, module, args, output)
            if self._is_new and (owner := self.owner()) is not None:
                self._is_new = False
                try:
                    self._native = owner.native_function(module, self.sites)
                except Exception as error:
                    owner.context.handle("creating the native function of a hook", error)

    def resumes(self, context: Any) -> bool:
        """Return whether recording goes on with this call, because the model is never called as a whole."""
        return context.tracker.is_rootless and bool(context.resumes())

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
                if gradients and tensor.requires_grad and not is_traced_branch():
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

    def resumes(self, context: Any) -> bool:
        """Return whether recording goes on with this call."""
        return bool(context.resumes(running=1))

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that report the call and observe what the root receives."""
        switch = self.switch
        if switch is None or (root := switch.root) is None or torch.compiler.is_exporting():
            return
        training, gradients = args[0].training, torch.is_grad_enabled()
        root_called(root, training, gradients, next_call())
        if training and gradients and switch.on and switch.inputs:
            for path, tensor in leaves((args[1], args[2]) if args[2] else args[1]):
                observe(tensor.detach(), root, INPUTS, path, next_call())


class RootEndsHook(RootBeginsHook):
    """The forward hook of a root."""

    __slots__ = ()

    resumes = Hook.resumes

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
                if tensor.requires_grad and not is_traced_branch():
                    _report_gradient(tensor, root, GRADIENTS, "")
                    break


def _report_gradient(tensor: Tensor, number: Tensor, role: int, path: str) -> None:
    call = next_call()

    def report(grad: Tensor) -> Tensor:
        observe(grad.detach(), number, role, path, call)
        return grad  # compiled autograd would take None as the gradient

    tensor.register_hook(report)


def _register_in_graph(output: Tensor, number: Tensor, path: str) -> None:
    """Add operators that observe the gradient of `output`, or of its base if an in-place operation follows on a view."""
    base = output._base
    if base is None or not base.requires_grad or base.numel() != output.numel():
        _report_gradient(output, number, GRADIENTS, path)
        return
    size, stride, call = output.size(), output.stride(), next_call()
    _report_gradient(output, number, VIEW, path)

    def report(grad: Tensor) -> Tensor:
        observe(grad.detach().contiguous().as_strided(size, stride), number, BASE, path, call)
        return grad  # as in `_report_gradient`

    base.register_hook(report)
