"""Runs Triton kernels on the simulated device, with Triton's interpreter (``TRITON_INTERPRET=1``)."""

from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.statistics.device import statistics, triton_launcher
from tests.simulated_device import streams
from tests.simulated_device.cuda import bytes_of
from tests.simulated_device.log import write
from tests.simulated_device.storage import OFFSET, is_simulated, memory_of

__all__ = ["install_triton"]


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the memory of device tensors; addresses in int64 tensors become those of this memory."""
    lowered, read = [], 0
    for x in arguments:
        if is_simulated(x):
            streams.require_finished(x)
            x = memory_of(x)
            if x.dtype is torch.int64:
                x = torch.where(x >= OFFSET, x - OFFSET, x)
            elif x.dtype is not torch.float64:
                read += bytes_of(x)
        lowered.append(x)
    kernel[(programs,)](*lowered, **constants)
    written = programs * 14 * 8
    if kernel.__name__ == "measure_list":
        chunks = lowered[2].view(-1, 3)
        size = {"fp32": 4, "bf16": 2, "fp16": 2}[constants["DTYPE"].name] * (1 + constants["DIFFERENCE"])
        read = size * int((chunks[:, 2] - chunks[:, 1] * constants["BLOCK"]).sum())
    write("launch", kernel.__name__, read, written, 1)
    streams.current_stream().kernels += 1
    for x in arguments:
        if isinstance(x, Tensor) and x.dtype is torch.float64:
            streams.note_written(x)


def install_triton() -> None:
    """Let the simulated device have Triton."""
    triton_launcher.launch = _launch
    on_cuda = triton_launcher.triton_kernels

    def triton_kernels(device: torch.device) -> Any:
        if device.type != "sim":
            return on_cuda(device)
        return _kernels.setdefault(device, triton_launcher.TritonKernels(device))

    _kernels: dict[torch.device, triton_launcher.TritonKernels] = {}
    statistics.triton_kernels = triton_launcher.triton_kernels = triton_kernels
