"""Records tensors that the user's model passes to ``observe``, because no module returns them."""

import threading
import weakref
from collections.abc import Callable
from itertools import count
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from ikkuna.metrics.messages.kinds import OBSERVED
from ikkuna.observation.hooks.context import HookContext, next_call, trace_nothing
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.hook import Hook, in_backward

_ALL, _NOBODY = -1, -2


class _Switch:
    """Values that compiled graphs read at every call; they are compiled once for each value.

    Attributes
    ----------
    on : bool
        Whether any exporter samples observed tensors at its next step.
    """

    def __init__(self) -> None:
        self.on = False


class ObservedHooks:
    """Records the observed tensors of one exporter.

    A recomputation in a backward is not recorded.

    Parameters
    ----------
    context : HookContext
    forward : ForwardHooks
        Finds the forward of a call outside any root.

    Attributes
    ----------
    number : int
        The number by which compiled graphs name the exporter.
    hook : Hook
        Called with a name and a tensor; it raises nothing.
    """

    def __init__(self, context: HookContext, forward: ForwardHooks) -> None:
        self.context = context
        self._forward = forward
        self.number = next(_NEXT)
        self.hook = _ObserveHook(self, ObservedHooks.observed, self.number)
        self.is_wanted = False

    def set_wanted(self, is_wanted: bool) -> None:
        """Set whether the next step is sampled; until then a call returns at once."""
        if is_wanted != self.is_wanted:
            self.is_wanted = is_wanted
            _replace(self, is_wanted)

    def observed(self, name: str, tensor: Tensor) -> None:
        """Record a tensor under a name."""
        context, thread = self.context, get_ident()
        if context.recorder.rows is None or OBSERVED not in context.recorder.plan.kinds:
            return
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"observe() needs a name and a tensor, got {type(name).__name__} and {type(tensor).__name__}"
            )
        if calls := context.tracker.calls[thread].running:
            forward = calls[0]
        elif in_backward():
            return
        else:
            forward = self._forward.part_called(thread, True)
        if forward is not None:
            context.recorder.receive(context.sites(OBSERVED, name), tensor.detach(), "", part=forward.part)


class _ObserveHook(Hook):
    """Calls `ObservedHooks.observed`, or leaves an operator in a graph that is being compiled."""

    __slots__ = ("number",)

    def __init__(self, owner: Any = None, function: Callable[..., object] | None = None, number: int = _NOBODY) -> None:
        super().__init__(owner, function)
        self.number = number

    def leave_in_graph(self, *args: Any) -> None:
        """Add an operator that observes the tensor."""
        _leave_in_graph(args[0], args[1], self.number)


# process-wide, as torch's global hooks of optimizers are: a forward does not know who watches its model
_NEXT = count()
_observers: "tuple[weakref.ref[ObservedHooks], ...]" = ()
_lock = threading.RLock()
_switch = _Switch()


def _replace(hooks: ObservedHooks, add: bool) -> None:
    """Add or remove an exporter whose next step is sampled."""
    global _observers
    with _lock:
        others = tuple(known for known in _observers if known() is not None and known() is not hooks)
        _observers = (*others, weakref.ref(hooks)) if add else others
        _switch.on = bool(_observers)


def observe(name: str, tensor: Tensor) -> None:
    """Let the exporters that watch the running model record a tensor that no module returns.

    The tensor is a message of the kind ``observed``, under `name` in place of the module: ``NormSubscriber("observed")`` shows the norm
    of all such tensors, and ``modules="router*"`` selects some.
    Several calls of one name in a step, and those of several micro-batches, are merged; recomputations of checkpoints do not count.
    The tensor and its gradient stay as they are, and nothing is raised.
    If no subscriber samples the step, the function returns at once; under ``torch.compile`` it then leaves nothing in the graph.

    Parameters
    ----------
    name : str
        Any name; dots and ``/`` group names.
    tensor : Tensor
        Any tensor with numbers.

    Examples
    --------
    >>> import ikkuna
    >>> from ikkuna.export import Exporter
    >>> from ikkuna.export.messages import MessageBus
    >>> from ikkuna.export.subscriber import CallbackSubscriber
    >>> class Doubling(torch.nn.Linear):
    ...     def forward(self, x):
    ...         scores = super().forward(x) * 2
    ...         ikkuna.observe("scores", scores)
    ...         return scores.softmax(-1)
    >>> model = Doubling(2, 3)
    >>> with Exporter(message_bus=MessageBus()) as exporter:
    ...     exporter.add_modules(model)
    ...     seen = CallbackSubscriber("observed", lambda message: print(message.name, tuple(message.data.shape)))
    ...     handle = exporter.message_bus.register_subscriber(seen)
    ...     model(torch.ones(4, 2)).sum().backward()
    scores (4, 3)
    """
    if not _switch.on:
        return
    if torch.compiler.is_compiling():
        _leave_in_graph(name, tensor, _ALL)
        return
    for reference in _observers:
        if (hooks := reference()) is not None:
            hooks.hook(name, tensor)


def _leave_in_graph(name: str, tensor: Tensor, exporter: int) -> None:
    if _switch.on and torch.is_grad_enabled() and not torch.compiler.is_exporting():
        _observe_named(tensor.detach(), name, exporter, next_call())


torch.library.define("ikkuna::observe_named", "(Tensor tensor, str name, int exporter, int call) -> ()")


@torch.library.impl("ikkuna::observe_named", "CompositeExplicitAutograd")
def _run(tensor: Tensor, name: str, exporter: int, call: int) -> None:
    if in_backward():  # the recomputation of a checkpoint
        return
    for reference in _observers:
        if (hooks := reference()) is not None and exporter in (_ALL, hooks.number):
            hooks.hook(name, tensor)


torch.library.impl("ikkuna::observe_named", "Meta", trace_nothing)
_observe_named = torch.ops.ikkuna.observe_named.default
torch.fx.node.has_side_effect(_observe_named)
