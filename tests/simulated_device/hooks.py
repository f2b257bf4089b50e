"""Errors of hooks in a backward on the simulated device.

Torch's device guard for backends in Python calls a Python function while the stack is unwound; if the exception of a hook is set then,
the call fails, and ``std::terminate`` ends the process.  The guards of CUDA and others are C++, and have no such limit.
Here hooks of tensors on the device raise nothing within the backward, and the first exception is raised at its end.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["raise_errors_of_hooks"]

_errors: list[BaseException] = []


class _KeptHook:
    """Calls a hook, and keeps its exception."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        try:
            return self._hook(*args)
        except BaseException as error:
            _errors.append(error)
            return None


def raise_errors_of_hooks() -> None:
    """Let a backward raise the first exception of the hooks of tensors on the device at its end; this lasts."""
    run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        errors, _errors[:] = _errors[:], []
        if errors:
            raise errors[0]
        return result

    def keeping(register: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, hook: register(x, _KeptHook(hook) if x.device.type == "sim" else hook)

    torch.autograd._engine_run_backward = run_backward
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(Tensor, name, keeping(getattr(Tensor, name)))
