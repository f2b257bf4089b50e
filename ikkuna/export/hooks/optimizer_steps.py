"""The pair of torch's global optimizer hooks, which all exporters of the process share."""

from threading import RLock
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ikkuna.export.hooks.hook import Hook, Remove

__all__ = ["StepHooks", "call_at_steps"]


class StepHooks(NamedTuple):
    """The hooks of one exporter.

    Parameters
    ----------
    begins, ends : Hook
        Called with an optimizer, its arguments and its keyword arguments before and after its step.
    """

    begins: Hook
    ends: Hook


# process-wide, as torch's global hooks are
_called: tuple[StepHooks, ...] = ()
_handles: tuple[RemovableHandle, ...] = ()
_lock = RLock()


def call_at_steps(hooks: StepHooks) -> Remove:
    """Call hooks before and after the step of any optimizer, until the returned function is called.

    torch iterates over its dictionary of global hooks in each step, so a change of this dictionary raises in the step of another thread.
    Therefore one pair is registered at the first call and never removed; it reads an immutable tuple.
    """
    with _lock:
        _register_once()
    _replace(hooks, add=True)
    return lambda: _replace(hooks, add=False)


def _replace(hooks: StepHooks, add: bool) -> None:
    global _called
    with _lock:
        is_done = False
        while not is_done:  # a garbage collection while the tuple is made may remove the hooks of other exporters
            before = _called
            after = (*(each for each in before if each is not hooks), *((hooks,) if add else ()))
            if is_done := _called is before:
                _called = after


def _register_once() -> None:
    global _handles
    if not _handles or any(handle.id not in (handle.hooks_dict_ref() or ()) for handle in _handles):
        for handle in _handles:
            handle.remove()
        # a compiled step() must not trace into the hooks
        begins, ends = torch.compiler.disable(_step_begins), torch.compiler.disable(_step_ends)
        _handles = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for hooks in _called:
        hooks.begins(optimizer, args, kwargs)


def _step_ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for hooks in _called:
        hooks.ends(optimizer, args, kwargs)
