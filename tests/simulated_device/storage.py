"""Memory of the simulated device."""

import math
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__all__ = ["OFFSET", "allocate", "copy_storage", "features", "is_simulated", "memory", "memory_of", "require_dtype"]

OFFSET = 1 << 62
"""A device address is an address of the host plus this; reading it is a segmentation fault."""

memory = SimpleNamespace(used=0, peak=0, limit=math.inf)
"""Bytes in use, the most bytes in use since it was set, and the bytes that there are."""

features = SimpleNamespace(has_float64=True)
"""Whether the device has float64; ``mps`` has not."""

_WIDE = (torch.float64, torch.complex128)
_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_SET = torch.ops.aten.set_.source_Storage_storage_offset


def is_simulated(x: Any) -> bool:
    """Return whether `x` is a tensor of the device."""
    return isinstance(x, Tensor) and x.device.type == "sim"


def _reserve(size: int) -> None:
    if memory.used + size > memory.limit:
        raise torch.OutOfMemoryError(f"sim out of memory: {size} bytes wanted, {memory.used} of {memory.limit} in use")
    memory.used += size
    memory.peak = max(memory.peak, memory.used)


def require_dtype(dtype: torch.dtype) -> None:
    """Raise the error of a device without float64 if it would have to store this dtype."""
    if dtype in _WIDE and not features.has_float64:
        raise TypeError(f"Cannot convert a sim Tensor to {dtype} as the sim framework doesn't support float64")


def allocate(host: Tensor, into: Tensor | None = None) -> Tensor:
    """Return a device tensor whose memory is `host`; if `into` is given, it gets this memory and is returned."""
    require_dtype(host.dtype)
    held = host.untyped_storage()
    _reserve(held.nbytes())
    storage = torch._C._construct_storage_from_data_pointer(
        held.data_ptr() + OFFSET, torch.device("sim", 0), held.nbytes()
    )
    weakref.finalize(storage, _reserve, -held.nbytes())
    storage.host = held
    target = torch._C._acc.create_empty_tensor([0], host.dtype) if into is None else into
    result: Tensor = _SET.redispatch(_HOST, target, storage, host.storage_offset(), host.shape, host.stride())
    return result


def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage of the device, as ``copy.deepcopy`` of a tensor needs."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.host)  # type: ignore[attr-defined]
    return allocate(memory.clone()).untyped_storage()


def memory_of(x: Tensor) -> Tensor:
    """Return the memory of a device tensor as a tensor of the host."""
    return torch.empty(0, dtype=x.dtype, device="cpu").set_(
        x.untyped_storage().host, x.storage_offset(), x.shape, x.stride()
    )
