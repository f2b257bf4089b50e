"""Lets the simulated device have Triton: its interpreter (``TRITON_INTERPRET=1``), or the reference kernels."""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.statistics.device import statistics, triton_launcher, warm_up
from tests.simulated_device import features, reference_kernels, streams
from tests.simulated_device.cuda import bytes_of
from tests.simulated_device.log import write
from tests.simulated_device.storage import OFFSET, is_simulated, memory_of

__all__ = ["ReferenceKernels", "install_triton", "launch"]

_LISTS = ("measure_list", "sample_list")
_HISTOGRAM = 4 * 4096  # bytes
_PARTS = 1 << 16


class ReferenceKernels(triton_launcher.TritonKernels):
    """Launches the reference kernels, which need no Triton."""

    @staticmethod
    def import_kernels() -> tuple[Any, Any]:
        """Return the reference kernels, and the names of the dtypes."""
        names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
        return reference_kernels, SimpleNamespace(**{key: SimpleNamespace(name=name) for key, name in names.items()})


def _lower(name: str, position: int, x: Any) -> Any:
    if not is_simulated(x):
        return x
    streams.require_finished(x)
    host = memory_of(x)
    is_table_of_addresses = name in _LISTS and position == 0
    return torch.where(host >= OFFSET, host - OFFSET, host) if is_table_of_addresses else host


def _traffic(name: str, arguments: list[Any], programs: int, constants: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, without its small tables."""
    if name == "measure_one":
        x, n = arguments[:2]
        counted = min(n * 4, _HISTOGRAM * arguments[5]) if constants["COUNT"] else 0
        return bytes_of(x), programs * 112 + counted
    if name == "merge_rows":
        return len(arguments[1]) * 112, bytes_of(arguments[3])
    if name == "merge_codes":
        return len(arguments[1]) * _HISTOGRAM, bytes_of(arguments[4])
    if name == "sample_one":
        return _PARTS * arguments[0].element_size(), _HISTOGRAM
    size = reference_kernels.DTYPES[constants["DTYPE"].name].itemsize
    if name == "sample_list":
        tensors = len(arguments[2]) // 3
        return tensors * _PARTS * size * (1 + constants["DIFFERENCE"]), tensors * _HISTOGRAM
    chunks = arguments[2].view(-1, 4)
    elements = chunks[:, 2] - chunks[:, 1] * constants["BLOCK"]
    read, other = size * int(elements.sum()), constants["OTHER"]
    copied = size * int(elements[arguments[0][arguments[1] :][chunks[:, 0]] != 0].sum()) if other == 2 else 0
    counted = 0
    if constants["COUNT"]:
        counted = sum(
            min(4 * n, _HISTOGRAM) for n, h in zip(elements.tolist(), chunks[:, 3].tolist(), strict=True) if h >= 0
        )
    return read * (2 if other == 1 else 1), programs * 112 + copied + counted


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the memory of device tensors; addresses become those of this memory."""
    name = kernel.__name__
    lowered = [_lower(name, i, x) for i, x in enumerate(arguments)]
    if kernel is getattr(reference_kernels, name):
        kernel(*lowered, **constants)
    else:
        kernel[(programs,)](*lowered, **constants)
    write("launch", name, *_traffic(name, lowered, programs, constants), 1)
    streams.current_stream().kernels += 1
    for x in arguments:
        if isinstance(x, Tensor) and (x.dtype in (torch.float64, torch.int32) or name == "merge_codes"):
            streams.note_written(x)


def install_triton(
    make: type[triton_launcher.TritonKernels] = triton_launcher.TritonKernels, patch: Any = setattr
) -> None:
    """Let the simulated device have kernels, those that Triton interprets or `ReferenceKernels`."""
    on_cuda = triton_launcher.triton_kernels
    kernels: dict[torch.device, triton_launcher.TritonKernels] = {}

    def triton_kernels(device: torch.device) -> Any:
        if device.type != "sim":
            return on_cuda(device)
        if not features.has_float64:  # the rows of kernels are float64
            return None
        if device not in kernels:
            kernels[device] = make(device)
        return kernels[device]

    patch(triton_launcher, "launch", launch)
    for name in (statistics.__name__, triton_launcher.__name__, warm_up.__module__):
        patch(sys.modules[name], "triton_kernels", triton_kernels)
