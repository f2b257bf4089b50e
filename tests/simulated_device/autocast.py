"""Autocast on the simulated device."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["install_autocast"]

_NARROW = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d")
"""Operators that autocast computes in half precision; all others keep the dtype of their arguments."""

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _cast(x: Any) -> Any:
    if isinstance(x, Tensor) and x.device.type == "sim" and x.dtype is torch.float32:
        return x.to(torch.get_autocast_dtype("sim"))
    return x


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return op(*map(_cast, args), **{key: _cast(x) for key, x in kwargs.items()})


def install_autocast(everything: torch.library.Library, aten: torch.library.Library) -> None:
    """Register the kernels with the libraries of the device."""
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in _NARROW:
        packet = getattr(torch.ops.aten, name)
        aten.impl(name, partial(_run, packet.default), "AutocastPrivateUse1")
