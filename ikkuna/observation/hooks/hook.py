"""The base class of ikkuna's hooks, which copies and pickles of modules leave out, and the stopwatch of their time."""

import copyreg
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_compiling

from ikkuna.numerics.statistics.native.hook_functions import NO_THREADS
from ikkuna.support.torch_internals import function_transforms, graph_task, skip_in_compiler, tracing_state

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


def is_traced() -> bool:
    """Return whether a transform of :mod:`torch.func` or a tracer runs on this thread."""
    return function_transforms() is not None or tracing_state() is not None


def _do_nothing(*args: object) -> None:
    """Stand for the function of a hook without an owner."""


class _Local(threading.local):
    depth = 0
    since = 0.0


class Stopwatch:
    """Adds up the time between `start` and `stop` on each thread; nested pairs are counted once.

    Parameters
    ----------
    others : callable, optional
        Returns the seconds that were measured elsewhere, outside of such pairs.

    Attributes
    ----------
    spent : float
        Seconds between `start` and `stop`, on all threads together.
    local : object
        The number of open pairs on this thread, and when the outermost of them began.

    Examples
    --------
    >>> watch = Stopwatch()
    >>> watch.start(), watch.start(), watch.stop(), watch.stop()
    (None, None, None, None)
    >>> 0 < watch.spent < 1, watch.overhead()
    (True, 0.0)
    """

    __slots__ = ("_began", "_ended", "_lap", "_others", "_spent_before", "_spent_until_end", "local", "spent")

    def __init__(self, others: Callable[[], float] = float) -> None:
        self.spent = 0.0
        self._others = others
        self.local = _Local()
        self._began: float | None = None
        self._ended = 0.0
        self._spent_before = self._spent_until_end = 0.0
        self._lap: tuple[float, float] | None = None

    def start(self) -> None:
        """Start to count."""
        local = self.local
        local.depth += 1
        if local.depth == 1:
            local.since = time.perf_counter()

    def stop(self) -> None:
        """Stop to count."""
        local = self.local
        local.depth -= 1
        if local.depth == 0:
            self.spent += time.perf_counter() - local.since

    def restart(self) -> None:
        """Start to count at an outermost `start` of this thread, after exceptions have left starts without their stops."""
        self.local.depth, self.local.since = 1, time.perf_counter()

    def lap(self) -> tuple[float, float] | None:
        """Return the seconds since the last call and how many of them ikkuna took; ``None`` for the first call."""
        now = time.perf_counter()
        spent = self._spent_until(now)
        before, self._lap = self._lap, (now, spent)
        return None if before is None else (now - before[0], spent - before[1])

    def step_ended(self) -> None:
        """Mark the end of a step; the first one is left out, because it creates what the others reuse."""
        self._ended = time.perf_counter()
        self._spent_until_end = self._spent_until(self._ended)
        if self._began is None:
            self._began, self._spent_before = self._ended, self._spent_until_end

    def steps_passed(self, ended: float, later: float) -> None:
        """Mark the end of the last of several steps, in seconds of the clock, and how many seconds were spent later."""
        spent = self.spent + self._others() - later
        self._lap = ended, spent
        self._ended, self._spent_until_end = ended, spent

    def _spent_until(self, now: float) -> float:
        """Return the seconds that were spent, including the pair that is open on this thread."""
        return self.spent + self._others() + (now - self.local.since if self.local.depth else 0.0)

    def overhead(self, beside: float = 0.0) -> float:
        """Return the time that ikkuna took as a share of the remaining time, from the second step on; 0 before.

        It can be larger than the slowdown, because a training step and another thread may run at the same time.

        Parameters
        ----------
        beside : float
            Seconds that other threads of ikkuna have kept the interpreter busy.
        """
        if self._began is None:
            return 0.0
        own = self._spent_until_end - self._spent_before + beside
        others = self._ended - self._began - own
        return own / others if others > 0 else 0.0

    @property
    def spent_later(self) -> float:
        """Seconds that ikkuna took from the second step on."""
        return self._spent_until_end - self._spent_before


class Hook:
    """Calls ``function(owner, *bound, *args)``, returns nothing, and passes no error on, except those that belong to the user.

    The owner is an adapter with a ``context`` (see `HookContext`), held weakly.  The time is counted by the context's stopwatch, and errors
    are handled by the context.  A copied or unpickled hook has no owner and does nothing.  Inside ``torch.func`` transforms
    and tracers, and while a CUDA graph is captured, a hook does nothing.
    The permits of native functions end first, because this hook may change what they depend on.
    While nothing is recorded, see `HookContext.is_off`, the function is not called, unless :meth:`resumes` returns true.
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

    Attributes
    ----------
    count : object, optional
        What handles a usual event of a step that is only counted without :meth:`__call__`.
    """

    __slots__ = ("__weakref__", "bound", "count", "function", "owner")

    def __init__(self, owner: Any = None, function: Callable[..., object] | None = None, *bound: Any) -> None:
        self.owner = _no_owner if owner is None else weakref.ref(owner)
        self.function = function or _do_nothing
        self.bound = bound
        self.count: object = None

    def counted(self) -> Self:
        """Let a native function handle usual events of steps that are only counted, if there is one; return the hook."""
        owner: Any = self.owner()
        self.count = owner.context.native_handlers.get(self.function)
        owner.context.native.call_natively(type(self))
        return self

    def __call__(self, *args: Any) -> None:
        """Call the function, if the owner exists and nothing is being traced."""
        if is_compiling():
            self.leave_in_graph(*args)
            return
        if (owner := self.owner()) is None:
            return
        context = owner.context
        stopwatch = context.stopwatch
        try:
            if in_capture():
                context.is_captured()
                return
            count_only = context.idle_handlers.get(self.function)
            is_counted = count_only is not None and count_only(*args)
            if is_counted or function_transforms() is not None or tracing_state() is not None:  # as `is_traced` does
                return
            local = stopwatch.local  # as `Stopwatch.start` and `stop` do
            try:
                local.depth += 1
                if local.depth == 1:
                    local.since = time.perf_counter()
                context.native.threads[:] = NO_THREADS  # as `close` does
                if (
                    context._is_paused or context.is_interrupted or context.error_guard.thread.subscriber_is_running
                ) and not self.resumes(context):  # as `HookContext.is_off` does
                    return
                self.function(owner, *self.bound, *args)
            finally:
                local.depth -= 1
                if not local.depth:
                    stopwatch.spent += time.perf_counter() - local.since
        except BaseException as error:
            context.handle(self.function.__name__, error)

    def resumes(self, context: Any) -> bool:
        """Return whether the function is called although nothing is recorded now; by default it is not."""
        return False

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


_HOOKS = {  # dictionaries of hooks → dictionaries of the marks of these hooks
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
}
_USERS: Counter[type[nn.Module]] = Counter()  # of this process, like the table of copyreg


class HookFreeCopies:
    """Makes ``copy``, ``pickle`` and ``torch.save`` leave ikkuna's hooks out, for some classes of modules.

    A copy, such as an average of weights, is not observed, can be scripted, and can be loaded where ikkuna is not installed.
    For this a function is registered with ``copyreg``; a class for which the user has registered one keeps it.

    Examples
    --------
    >>> import copy
    >>> model, copies = nn.Linear(2, 2), HookFreeCopies()
    >>> handle = model.register_forward_hook(Hook())
    >>> copies.include([model])
    >>> len(copy.deepcopy(model)._forward_hooks)
    0
    >>> copies.remove()
    """

    def __init__(self) -> None:
        self._classes: set[type[nn.Module]] = set()

    def include(self, modules: Iterable[nn.Module]) -> None:
        """Include the classes of modules."""
        for cls in {type(module) for module in modules} - self._classes:
            if copyreg.dispatch_table.setdefault(cls, _reduce) is _reduce:
                self._classes.add(cls)
                _USERS[cls] += 1

    def remove(self) -> None:
        """Remove what was registered, unless another object needs it."""
        while self._classes:
            cls = self._classes.pop()
            _USERS[cls] -= 1
            if not _USERS[cls]:
                del _USERS[cls]
                if copyreg.dispatch_table.get(cls) is _reduce:
                    del copyreg.dispatch_table[cls]


def _reduce(module: nn.Module) -> Any:
    """Return what the module's own ``__reduce_ex__`` returns, without ikkuna's hooks in its state."""
    reduced = module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    state = reduced[2]
    if isinstance(state, dict):
        state = _without_hooks(state)
    elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):  # a class with slots
        state = _without_hooks(state[0]), state[1]
    return (*reduced[:2], state, *reduced[3:])


def _without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, marks in _HOOKS.items():
        hooks = state.get(name)
        own = {key for key, hook in hooks.items() if isinstance(hook, Hook)} if isinstance(hooks, dict) else set()
        for each in (name, *marks) if own else ():
            changed[each] = OrderedDict((key, value) for key, value in state.get(each, {}).items() if key not in own)
    return {**state, **changed} if changed else state
