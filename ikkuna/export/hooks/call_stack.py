"""What the Python stack of this thread says about calls whose end no hook reports."""

import sys
from collections.abc import Collection, Iterator
from types import FrameType

from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["count_running_calls", "in_reentrant_checkpoint", "running_optimizers"]

_CALL = nn.Module._call_impl.__code__
_RECOMPUTE = CheckpointFunction.backward.__code__


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_optimizers() -> list[Optimizer]:
    """Return the optimizers whose ``step()`` runs on this thread, the innermost first, each as often as it calls itself.

    A step that raises calls no post hook, but torch's wrapper of it is not on the stack any more.

    Examples
    --------
    >>> running_optimizers()
    []
    """
    found: list[Optimizer] = []
    for frame in _frames():
        if "wrapper" in frame.f_code.co_name and frame.f_globals is vars(torch_optimizer):
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                found.append(optimizer)
    return found


def count_running_calls(modules: Collection[nn.Module]) -> int:
    """Return how many calls of `modules` run on this thread.

    A call that an exception such as `KeyboardInterrupt` ended calls no forward hook.

    Examples
    --------
    >>> count_running_calls([nn.Linear(1, 1)])
    0
    """
    ids = {id(module) for module in modules}
    return sum(frame.f_code is _CALL and id(frame.f_locals.get("self")) in ids for frame in _frames())


def in_reentrant_checkpoint() -> bool:
    """Return whether a reentrant checkpoint recomputes a forward on this thread.

    Examples
    --------
    >>> in_reentrant_checkpoint()
    False
    """
    return any(frame.f_code is _RECOMPUTE for frame in _frames())
