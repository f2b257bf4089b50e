"""Where ikkuna touches torch: one function per quantity, each of which returns its undo."""

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ikkuna.export.hooks import graph_operators as traced
from ikkuna.export.hooks.nested_tensors import leaves
from ikkuna.export.hooks.slots import BASE, VIEW
from ikkuna.export.rows.site import Site

__all__ = [
    "Hook",
    "ModulePlaces",
    "ModuleTap",
    "RootEntered",
    "RootLeft",
    "Switch",
    "Undo",
    "blind_after_fork",
    "in_backward",
    "received",
    "tap_gradient",
    "tap_loss",
    "tap_module",
    "tap_optimizers",
    "tap_root",
    "was_compiled",
    "watch_gradient",
]

Undo = Callable[[], None]

_interpreters, _tracing_state = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_programs_of = torch._C._dynamo.eval_frame._debug_get_cache_entry_list


def _nobody() -> None:
    """Be the reference to an owner that there never was."""


def in_backward() -> bool:
    """Whether autograd is running here: a forward seen then is the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


class Hook:
    """A hook that holds its owner weakly, and goes blind when its module is copied or pickled.

    Calls ``getattr(owner, method)(*bound, *args)``, never returns anything, and lets no error out: the owner's ``fault`` takes it.
    The owner's ``stopwatch`` counts the time.
    To a torch.func transform or a tracer it does not exist, to a compiler it is what `leave_in_graph` does.

    It runs between two kernels of the user's that have emptied the caches, where every further call of a function costs
    several times what it costs elsewhere: so it is one function, and those it calls go straight to the measurement.
    """

    __slots__ = ("__weakref__", "bound", "method", "owner")

    def __init__(self, owner: Any = None, method: str = "", *bound: Any) -> None:
        self.owner = _nobody if owner is None else weakref.ref(owner)
        self.method = method
        self.bound = bound

    def __call__(self, *args: Any) -> None:
        """Call the owner's method, if there is an owner and nobody is tracing."""
        if torch.compiler.is_compiling():
            self.leave_in_graph(*args)
            return
        if _interpreters() is not None or _tracing_state() is not None or (owner := self.owner()) is None:
            return
        stopwatch = owner.stopwatch
        stopwatch.start()
        try:
            getattr(owner, self.method)(*self.bound, *args)
        except Exception as error:
            owner.fault(self.method, error)
        finally:
            stopwatch.stop()

    def leave_in_graph(self, *args: Any) -> None:
        """Leave in a graph that is being compiled what will look: nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return type(self)()

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return type(self), ()


@dataclass(slots=True)
class Switch:
    """What a traced tap asks at every call; one graph is compiled for each answer.

    Parameters
    ----------
    on : whether the coming step is sampled
    root : the slot a compiled root reports to
    inputs, outputs : slots of what a root receives and returns, -1 for what nobody wants
    """

    on: bool = False
    root: int = -1
    inputs: int = -1
    outputs: int = -1


class ModulePlaces(NamedTuple):
    """Where one module's tensors go, ``None`` for what is not wanted."""

    inputs: Site | None = None
    activations: Site | None = None
    gradients: Site | None = None


def received(args: Any, outputs: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors a module was called with, but for those it wrote its outputs over."""
    return [(path, tensor) for path, tensor in leaves(args) if not any(tensor is output for _, output in outputs)]


class ModuleTap(Hook):
    """The hook of one module: in a traced call it leaves the operators that will look, in an eager one it looks."""

    __slots__ = ("places", "slots", "switch")

    def __init__(self, owner: Any = None, places: ModulePlaces | None = None, switch: Switch | None = None) -> None:
        self.places = places or ModulePlaces()
        self.slots = tuple(None if place is None else place.slot for place in self.places)
        super().__init__(owner, "module_called", self.places)
        self.switch = switch

    def leave_in_graph(self, *args: Any) -> None:
        """Leave the operators that look at what the module receives and returns, and at the gradient."""
        if torch.is_grad_enabled() and self.switch is not None and self.switch.on and not torch.compiler.is_exporting():
            inputs, activations, gradients = self.slots
            outputs = leaves(args[2])
            if inputs is not None:
                for path, tensor in received(args[1], outputs):
                    traced.observe(tensor.detach(), inputs, path)
            for path, tensor in outputs:
                if activations is not None:
                    traced.observe(tensor.detach(), activations, path)
                if gradients is not None and tensor.requires_grad:
                    _watch_traced(tensor, gradients, path)


class RootEntered(Hook):
    """The hook before a root: in a traced call it leaves the operator that will open the step."""

    __slots__ = ("switch",)

    def __init__(self, owner: Any = None, method: str = "", switch: Switch | None = None) -> None:
        super().__init__(owner, method)
        self.switch = switch

    def leave_in_graph(self, *args: Any) -> None:
        """Leave the operators that open the step and look at what the root receives."""
        switch = self.switch
        if switch is not None and not torch.compiler.is_exporting():
            counts = args[0].training and torch.is_grad_enabled()
            traced.tick(switch.root, counts)
            if switch.on and counts and switch.inputs >= 0:
                for path, tensor in leaves((args[1], args[2]) if args[2] else args[1]):
                    traced.observe(tensor.detach(), switch.inputs, path)


class RootLeft(RootEntered):
    """The hook after a root."""

    __slots__ = ()

    def leave_in_graph(self, *args: Any) -> None:
        """Leave the operators that look at what the root returns."""
        switch = self.switch
        if switch is not None and not torch.compiler.is_exporting():
            counts = args[0].training and torch.is_grad_enabled()
            if switch.on and counts and switch.outputs >= 0:
                for path, tensor in leaves(args[2]):
                    traced.observe(tensor.detach(), switch.outputs, path)


def _run_as_it_is(function: Callable[..., Any]) -> None:
    """Keep a compiler from compiling this by itself, together with all it calls, where it does not trace its caller.

    It then takes hooks around a root's forward as programs of their own.  Traced from within a graph they are followed as ever.
    """
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, strategy)


_run_as_it_is(Hook.__call__)


def was_compiled(module: nn.Module) -> bool:
    """Whether a compiler has a program for a module's forward, which does not look for hooks that were not there when it was made."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and bool(_programs_of(code))


def watch_gradient(output: Tensor, seen: Callable[..., None]) -> list[Any]:
    """Have ``seen(grad)`` called with the gradient of `output`; return the handles of those hooks that would outlive the graph.

    An in-place operation after a module that returned a view cuts the tensor's own hook off without a word;
    the gradient then arrives at the view's base.  Both are watched, and tell themselves apart: ``seen(grad, role)``.
    Who receives drops the base's where the view's came.
    """
    base = output._base
    if base is None or not base.requires_grad or base.numel() != output.numel():
        handle = output.register_hook(seen)
        return [handle] if output.is_leaf else []
    size, stride = output.size(), output.stride()
    handles = [
        output.register_hook(lambda grad: seen(grad, VIEW)),
        base.register_hook(lambda grad: seen(grad.detach().contiguous().as_strided(size, stride), BASE)),
    ]
    return handles if base.is_leaf else []


def _watch_traced(output: Tensor, slot: int, path: str) -> None:
    watch_gradient(output, lambda grad, role=0: traced.observe(grad.detach(), slot + role, path))


def tap_module(
    module: nn.Module, owner: Any, places: ModulePlaces, switch: Switch | None, first: bool
) -> tuple[ModuleTap, Undo]:
    """Tell `owner` of each call of a module: ``module_called(places, module, args, output)``.

    Parameters
    ----------
    module : whose
    owner : who is told
    places : what is wanted of it
    switch : what a traced call asks; without one it leaves nothing in the graph
    first : put the hook before others, which the root needs: its hook is installed from within its own call
    """
    tap = ModuleTap(owner, places, switch)
    return tap, _removing((module.register_forward_hook(tap, prepend=first),))


def tap_root(module: nn.Module, owner: Any, switch: Switch | None) -> Undo:
    """Tell `owner` when a root is entered (``root_entered(module, args, kwargs)``) and left (``root_left(module, args, output)``)."""
    entered = module.register_forward_pre_hook(RootEntered(owner, "root_entered", switch), with_kwargs=True)
    left = module.register_forward_hook(RootLeft(owner, "root_left", switch), always_call=True)
    return _removing((entered, left))


def tap_loss(module: nn.Module, owner: Any) -> Undo:
    """Tell `owner` of each call of the loss module (``loss_called(module, args, kwargs, output)``)."""
    return _removing((module.register_forward_hook(Hook(owner, "loss_called"), with_kwargs=True),))


def tap_gradient(node: Any, owner: Any, *bound: Any) -> Undo:
    """Tell `owner` of each gradient that autograd's node is about to add to its parameter (``gradient_comes(*bound, grads)``).

    A hook on the parameter itself would also hear of gradients that are only asked for, and leave a trace there.
    """
    return _removing((node.register_prehook(Hook(owner, "gradient_comes", *bound)),))


def tap_optimizers(owner: Any) -> Undo:
    """Tell `owner` before and after the step of any optimizer of this process.

    ``optimizer_starts(optimizer, args, kwargs)`` and ``optimizer_ended(optimizer, args, kwargs)``.
    These hooks live outside the user's objects, so they also go when the owner does.
    """
    # a compiled step() must not trace into ours
    starts = register_optimizer_step_pre_hook(torch.compiler.disable(Hook(owner, "optimizer_starts")))
    ended = register_optimizer_step_post_hook(torch.compiler.disable(Hook(owner, "optimizer_ended")))
    return weakref.finalize(owner, _removing((starts, ended)))


def _removing(handles: Iterable[Any]) -> Undo:
    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def blind_after_fork(owner: Any) -> None:
    """Make `owner` look away in a forked child, where a data loader may call the model."""
    reference = weakref.ref(owner)

    def look_away() -> None:
        if (alive := reference()) is not None:
            alive.blind = True

    os.register_at_fork(after_in_child=look_away)
