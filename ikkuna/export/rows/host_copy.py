"""Copies tensors of a device to the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HostCopy"]


class HostCopy:
    """One non-blocking copy of several tensors of one device to the host: int64 as they are, others as float64.

    Parameters
    ----------
    tensors : sequence of Tensors
        They may be changed once the constructor has returned.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layout = [(tensor.shape, tensor.dtype is torch.int64) for tensor in tensors]
        flat = (tensor.reshape(-1) for tensor in tensors)
        packed = torch.cat([x.view(torch.float64) if x.dtype is torch.int64 else x.double() for x in flat])
        self._event: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._packed = packed.cpu()

    def arrived(self) -> bool:
        """Return whether the copy is complete."""
        return self._event is None or self._event.query()

    def arrays(self) -> list[NDArray[Any]]:
        """Return the tensors as arrays; wait for the copy if necessary."""
        if self._event is not None:
            self._event.synchronize()
        arrays, offset = [], 0
        for shape, is_integer in self._layout:
            flat = self._packed.numpy()[offset : offset + shape.numel()]
            arrays.append((flat.view(np.int64) if is_integer else flat).reshape(shape))
            offset += shape.numel()
        return arrays
