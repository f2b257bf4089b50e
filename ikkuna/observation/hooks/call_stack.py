"""Finds what runs on the stack of a thread: calls of modules, backwards, checkpoints, compiled programs."""

import sys
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ikkuna.support.torch_internals import BACKWARD_CALL, MODULE_CALL

_STAGE = "torch.distributed.pipelining.stage"
_DRY_RUNS = ("_forward_metadata_inference", "_shape_inference")  # their name depends on the version of torch
_CHECKPOINT, _CREATES_STATE = "torch.distributed.checkpoint.state_dict", "_init_optim_state"
_RECOMPUTE = CheckpointFunction.backward.__code__

SEES_BACKWARD = BACKWARD_CALL is not None
"""Whether this version of torch shows on the stack what a backward starts from."""


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def count_running_calls(modules: Collection[nn.Module]) -> int:
    """Return how many calls of `modules` run on this thread.

    A call that an exception such as `KeyboardInterrupt` ended calls no forward hook.

    Examples
    --------
    >>> count_running_calls([nn.Linear(1, 1)])
    0
    """
    ids = {id(module) for module in modules}
    return sum(frame.f_code is MODULE_CALL and id(frame.f_locals.get("self")) in ids for frame in _frames())


def in_dry_run() -> bool:
    """Return whether a pipeline runs a stage on this thread only to learn the shapes of its outputs, with meaningless inputs.

    Examples
    --------
    >>> in_dry_run()
    False
    """
    return any(frame.f_code.co_name in _DRY_RUNS and frame.f_globals.get("__name__") == _STAGE for frame in _frames())


def creates_optimizer_state() -> bool:
    """Return whether ``torch.distributed.checkpoint`` calls an optimizer on this thread only to create its state.

    Examples
    --------
    >>> creates_optimizer_state()
    False
    """
    return any(f.f_code.co_name == _CREATES_STATE and f.f_globals.get("__name__") == _CHECKPOINT for f in _frames())


def in_compiled_call() -> bool:
    """Return whether a program of ``torch.compile`` runs on this thread, although its outermost frames may not be compiled.

    Examples
    --------
    >>> in_compiled_call()
    False
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(frame.f_globals is vars(compiler) for frame in _frames())


def backward_roots() -> tuple[list[tuple[Any, Any]], bool]:
    """Return the tensors that the running backward starts from, with their gradients, and whether another one runs inside.

    There are none if that cannot be seen.

    Around a reentrant checkpoint this is the user's own backward.  Hooks of tensors on an accelerator run on a thread of autograd;
    the thread that called ``backward()`` waits then, and if several of them wait, nothing is returned.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> handle = x.register_hook(lambda grad: print(backward_roots()))
    >>> x.backward()
    ([(tensor(3., requires_grad=True), tensor(1.))], False)
    >>> backward_roots()
    ([], False)
    """
    if not (running := _running_backwards()):
        return [], False
    values = running[-1].f_locals
    gradients = values["args"][0] if values.get("args") else ()
    roots = tuple(values.get("t_outputs", ()))
    return list(zip(roots, (*gradients, *(None for _ in roots)), strict=False)), len(running) > 1


def accumulates_gradients() -> bool:
    """Return whether the running backward adds to gradients, as that of ``torch.autograd.grad`` does not.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> handle = x.register_hook(lambda grad: print(accumulates_gradients()))
    >>> x.backward()
    True
    >>> gradient = torch.autograd.grad(x * 2, x)
    False
    """
    running = _running_backwards()
    return bool(running) and bool(running[-1].f_locals.get("kwargs", {}).get("accumulate_grad"))


def _running_backwards() -> list[FrameType]:
    """Return the frames of the backwards that this thread runs, or else the only other one, the outermost one last."""
    if not SEES_BACKWARD:
        return []
    if running := _backwards(sys._getframe(1)):
        return running
    waiting = [found for frame in sys._current_frames().values() if (found := _backwards(frame))]
    return waiting[0] if len(waiting) == 1 else []


def _backwards(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the backwards that run on a stack, the outermost one last."""
    found = []
    while frame is not None:
        if frame.f_code is BACKWARD_CALL:
            found.append(frame)
        frame = frame.f_back
    return found


def in_reentrant_checkpoint() -> bool:
    """Return whether a reentrant checkpoint recomputes a forward on this thread.

    Examples
    --------
    >>> in_reentrant_checkpoint()
    False
    """
    return any(frame.f_code is _RECOMPUTE for frame in _frames())
