"""The base class of ikkuna's hooks."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from ikkuna.torch_internals import function_transforms, graph_task, skip_in_compiler, tracing_state

__all__ = ["MAY_CAPTURE", "Hook", "Remove", "in_backward", "in_capture", "remove_all"]

Remove = Callable[[], None]


def _no_owner() -> None:
    """Stand for the weak reference of a hook without an owner."""


def _captures() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


MAY_CAPTURE = torch.backends.cuda.is_built()
"""Whether this torch can record operators for a CUDA graph."""

in_capture: Callable[[], bool] = _captures if MAY_CAPTURE else bool
"""Whether the operators that this thread calls are recorded for a CUDA graph, and do not run; ``bool()`` is False."""


def in_backward() -> bool:
    """Whether autograd runs on this thread; a forward that begins then is the recomputation of a checkpoint."""
    return graph_task() != -1


def _do_nothing(*args: object) -> None:
    """Stand for the function of a hook without an owner."""


class Hook:
    """Calls ``function(owner, *bound, *args)``, returns nothing, and passes no error on, except those that belong to the user.

    The owner is an adapter with a ``context`` (see `HookContext`), held weakly.  The time is counted by the context's stopwatch, and errors
    are handled by the context.  A copied or unpickled hook has no owner and does nothing.  Inside ``torch.func`` transforms
    and tracers, and while a CUDA graph is captured, a hook does nothing.
    The permits of native functions end first, because this hook may change what they depend on.
    Inside a graph that is being compiled it calls :meth:`leave_in_graph`.

    This is one function with direct calls, because it runs between two kernels of the user's model that have emptied
    the processor's caches, where each further function call costs several times the usual.

    Parameters
    ----------
    owner : object, optional
        The adapter.
    function : callable
        An unbound method of the adapter.
    *bound : object
        Its first arguments.
    """

    __slots__ = ("__weakref__", "bound", "function", "owner")

    def __init__(self, owner: Any = None, function: Callable[..., object] | None = None, *bound: Any) -> None:
        self.owner = _no_owner if owner is None else weakref.ref(owner)
        self.function = function or _do_nothing
        self.bound = bound

    def __call__(self, *args: Any) -> None:
        """Call the function, if the owner exists and nothing is being traced."""
        if torch.compiler.is_compiling():
            self.leave_in_graph(*args)
            return
        if function_transforms() is not None or tracing_state() is not None or (owner := self.owner()) is None:
            return
        context = owner.context
        stopwatch = context.stopwatch
        try:
            if in_capture():
                context.is_captured()
                return
            try:
                stopwatch.start()
                context.native.close()
                self.function(owner, *self.bound, *args)
            finally:
                stopwatch.stop()
        except BaseException as error:
            context.handle(self.function.__name__, error)

    def leave_in_graph(self, *args: Any) -> None:
        """Add operators that measure to a graph that is being compiled; none by default."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return type(self)()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # a function of the standard library that does nothing, because a pickle may be loaded where ikkuna is not installed
        return getattr, (nullcontext(), "__exit__")


skip_in_compiler(
    Hook.__call__
)  # the compiler would compile hooks around the forward of a root, where it does not trace the caller


def remove_all(handles: Iterable[Any]) -> Remove:
    """Return a function that removes hooks."""

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
