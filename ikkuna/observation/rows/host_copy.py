"""Copies tensors of a device to the host."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.support.failures import raise_users_exception

__all__ = ["HostCopy"]


class HostCopy:
    """One non-blocking copy of several tensors of one device to the host.

    Parameters
    ----------
    tensors : sequence of Tensors
        They may be changed once the constructor has returned.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        device = tensors[0].device
        module = _module_with_events(device)
        self._bounds, packed = _pack(tensors)
        self._event: Any = None
        if module is None:
            self._packed = packed.cpu()
            return
        self._packed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._packed.copy_(packed, non_blocking=True)
        self._event = module.Event()
        self._event.record(module.current_stream(device))

    def arrived(self) -> bool:
        """Return whether the copy is complete, or has failed, so that `arrays` raises the error."""
        try:
            return self._event is None or bool(self._event.query())
        except RuntimeError as error:
            raise_users_exception(error)
            return True

    def arrays(self) -> list[NDArray[Any]]:
        """Return the tensors as arrays, floating-point numbers in float64; wait for the copy if necessary."""
        if self._event is not None:
            self._event.synchronize()
        groups = {dtype: self._packed[first:last].view(dtype) for dtype, (first, last) in self._bounds.items()}
        arrays, offsets = [], dict.fromkeys(groups, 0)
        for shape, dtype in self._shapes:
            offset, size = offsets[dtype], shape.numel()
            found = groups[dtype][offset : offset + size].reshape(shape)
            arrays.append((found.double() if dtype.is_floating_point else found).numpy())
            offsets[dtype] += size
        return arrays


def _pack(tensors: Sequence[Tensor]) -> tuple[dict[torch.dtype, tuple[int, int]], Tensor]:
    """Return the bytes of tensors in one tensor, those of each dtype together, and where these begin and end."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    bounds, parts, end = {}, [], 0
    for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize):  # so that each begins at a multiple of its size
        group = by_dtype[dtype]
        parts.append((torch.cat(group) if len(group) > 1 else group[0].contiguous()).view(torch.uint8))
        bounds[dtype] = end, (end := end + parts[-1].numel())
    return bounds, torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def _module_with_events(device: torch.device) -> Any:
    """Return the module of a device that can copy without waiting; ``None`` if it cannot."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None
