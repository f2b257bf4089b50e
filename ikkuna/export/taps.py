"""Where ikkuna touches torch: one function per quantity, each of which returns its undo.

Every tap ends in one function of ``(tensor, slot, path)``, :func:`observe`.
A slot is an integer, so that a traced graph can carry it where it could not carry an object.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ikkuna.export.recorder import Place

__all__ = [
    "SLOTS",
    "GradientSite",
    "Hook",
    "Sink",
    "Slots",
    "Undo",
    "blind_after_fork",
    "in_backward",
    "in_transform",
    "observe",
    "tap_loss",
    "tap_module",
    "tap_optimizers",
    "tap_root",
    "watch_gradient",
]

Undo = Callable[[], None]


class Sink(Protocol):
    """What a slot belongs to: it takes the tensors its taps see."""

    def receive(self, place: Place, tensor: Tensor, path: str) -> None:
        """Take a tensor of the user's, detached; never raise."""


class Slots:
    """Integers that stand for places of sinks, process-wide: all that a traced graph can carry."""

    def __init__(self) -> None:
        self._numbers = count()
        self._places: dict[int, tuple[weakref.ref[Sink], Place]] = {}

    def assign(self, sink: Sink, place: Place) -> int:
        """Return a new slot for a place of `sink`; it goes with the sink."""
        number = next(self._numbers)
        self._places[number] = weakref.ref(sink, lambda _: self._places.pop(number, None)), place
        return number

    def receive(self, number: int, tensor: Tensor, path: str) -> None:
        """Hand a tensor to the sink of a slot, if there still is one."""
        if (entry := self._places.get(number)) is not None and (sink := entry[0]()) is not None:
            sink.receive(entry[1], tensor, path)


SLOTS = Slots()


def observe(tensor: Tensor, slot: int, path: str) -> None:
    """Show a tensor to whoever owns the slot: the one door from torch into ikkuna."""
    SLOTS.receive(slot, tensor.detach(), path)


def in_backward() -> bool:
    """Whether autograd is running here: a forward seen then is the recomputation of a checkpoint."""
    task_id = getattr(torch._C, "_current_graph_task_id", None)
    return task_id is not None and task_id() != -1


def in_transform() -> bool:
    """Whether a torch.func transform, a tracer or an exporter is looking, to whom ikkuna must not exist."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


class Hook:
    """A hook that holds its owner weakly, and goes blind when its module is copied or pickled.

    Calls ``getattr(owner, method)(*bound, *args)``, never returns anything, and lets no error out: the owner's ``fault`` takes it.
    """

    __slots__ = ("__weakref__", "bound", "method", "owner")

    def __init__(self, owner: Any = None, method: str = "", *bound: Any) -> None:
        self.owner = weakref.ref(owner) if owner is not None else None
        self.method = method
        self.bound = bound

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the owner's method, if there is an owner and nobody is tracing."""
        if in_transform():
            return
        owner = self.owner() if self.owner is not None else None
        if owner is None:
            return
        try:
            getattr(owner, self.method)(*self.bound, *args, **kwargs)
        except Exception as error:
            owner.fault(self.method, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class GradientSite:
    """One tensor a module returned, waiting for its gradient.

    An in-place operation after a module that returned a view cuts the tensor's own hook off without a word;
    the gradient then arrives at the view's base.  Both are watched, and the base is heard only where the other stayed silent.
    """

    __slots__ = ("fired", "path", "shape", "slot")

    def __init__(self, slot: int, path: str, output: Tensor) -> None:
        self.slot = slot
        self.path = path
        self.shape = output.size(), output.stride(), output.storage_offset()
        self.fired = -1

    def own(self, grad: Tensor) -> None:
        """Take the gradient of the tensor itself."""
        self.fired = torch._C._current_graph_task_id()
        observe(grad, self.slot, self.path)

    def base(self, grad: Tensor) -> None:
        """Take the gradient of the tensor's base, in the shape of the tensor."""
        if self.fired != torch._C._current_graph_task_id():
            observe(grad.contiguous().as_strided(*self.shape), self.slot, self.path)


def watch_gradient(output: Tensor, slot: int, path: str) -> list[Any]:
    """Arm the hooks that see the gradient of `output`; return the handles of those that would outlive the graph."""
    site = GradientSite(slot, path, output)
    handles = [output.register_hook(site.own)]
    base = output._base
    if base is not None and base.requires_grad and base.numel() == output.numel():
        handles.append(base.register_hook(site.base))
    return handles if output.is_leaf or (base is not None and base.is_leaf) else []


def tap_module(module: nn.Module, owner: Any, activations: int | None, gradients: int | None, first: bool) -> Undo:
    """Tell `owner` of each call of a module: ``module_called(activations, gradients, module, args, output)``.

    Parameters
    ----------
    module : whose
    owner : who is told
    activations, gradients : slots of what is wanted, ``None`` for what is not
    first : put the hook before others, which the root needs: its hook is installed from within its own call
    """
    return _removing(
        (module.register_forward_hook(Hook(owner, "module_called", activations, gradients), prepend=first),)
    )


def tap_root(module: nn.Module, owner: Any) -> Undo:
    """Tell `owner` when a root is entered (``root_entered(module, args, kwargs)``) and left (``root_left(module, args, output)``)."""
    entered = module.register_forward_pre_hook(Hook(owner, "root_entered"), with_kwargs=True)
    left = module.register_forward_hook(Hook(owner, "root_left"), always_call=True)
    return _removing((entered, left))


def tap_loss(module: nn.Module, owner: Any) -> Undo:
    """Tell `owner` of each call of the loss module (``loss_called(module, args, kwargs, output)``)."""
    return _removing((module.register_forward_hook(Hook(owner, "loss_called"), with_kwargs=True),))


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
    """Make `owner` forget its taps in a forked child, where a data loader may call the model."""
    reference = weakref.ref(owner)

    def forget() -> None:
        if (alive := reference()) is not None:
            alive.blind = True

    os.register_at_fork(after_in_child=forget)
