"""What the Python stack of this thread says about calls whose end no hook reports."""

import sys
from collections.abc import Collection, Iterator
from types import FrameType

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["count_running_calls", "in_compiled_call", "in_dry_run", "in_reentrant_checkpoint", "running_steps"]

_CALL = nn.Module._call_impl.__code__
_SCALER_STEP = torch.amp.GradScaler.step.__code__
_STAGE = "torch.distributed.pipelining.stage"
_DRY_RUNS = ("_forward_metadata_inference", "_shape_inference")  # their name depends on the version of torch
_RECOMPUTE = CheckpointFunction.backward.__code__


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_steps() -> tuple[list[Optimizer], torch.amp.GradScaler | None]:
    """Return the optimizers whose ``step()`` runs on this thread, and the gradient scaler that calls the outermost of them.

    The innermost optimizer comes first, and each as often as it calls itself.
    A step that raises calls no post hook, but torch's wrapper of it is not on the stack any more.
    A scaler that is disabled is none.

    Examples
    --------
    >>> running_steps()
    ([], None)
    """
    found: list[Optimizer] = []
    scaler: torch.amp.GradScaler | None = None
    for frame in _frames():
        code = frame.f_code
        if "wrapper" in code.co_name and frame.f_globals is vars(torch_optimizer):
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                found.append(optimizer)
        elif code is _SCALER_STEP:
            scaler = frame.f_locals["self"]
    return found, scaler if scaler is not None and scaler.is_enabled() else None


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


def in_dry_run() -> bool:
    """Return whether a pipeline runs a stage on this thread only to learn the shapes of its outputs, with meaningless inputs.

    Examples
    --------
    >>> in_dry_run()
    False
    """
    return any(frame.f_code.co_name in _DRY_RUNS and frame.f_globals.get("__name__") == _STAGE for frame in _frames())


def in_compiled_call() -> bool:
    """Return whether a program of ``torch.compile`` runs on this thread, although its outermost frames may not be compiled.

    Examples
    --------
    >>> in_compiled_call()
    False
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(frame.f_globals is vars(compiler) for frame in _frames())


def in_reentrant_checkpoint() -> bool:
    """Return whether a reentrant checkpoint recomputes a forward on this thread.

    Examples
    --------
    >>> in_reentrant_checkpoint()
    False
    """
    return any(frame.f_code is _RECOMPUTE for frame in _frames())
