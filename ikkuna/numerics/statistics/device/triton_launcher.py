"""Launches the Triton kernels on CUDA and ROCm devices."""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ikkuna.logger import log
from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.record import HISTOGRAMS
from ikkuna.numerics.statistics.table import COLUMNS

__all__ = ["TritonKernels", "Written", "launch", "triton_kernels", "warm_up"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BLOCK = 4096
_CHUNK = 8 * _BLOCK  # elements that a program reads at least
_PROGRAMS = 264  # twice the multiprocessors of an H100
_BATCH = 128
_NOTHING = HISTOGRAMS | {"n"}


class Written(NamedTuple):
    """Rows that a kernel writes.

    Parameters
    ----------
    owners : tuple of int
        The row of the step to which each of them belongs.
    values : Tensor
        ``(rows, columns)``, float64, on the device.
    """

    owners: tuple[int, ...]
    values: Tensor


class TritonKernels:
    """The kernels on one device; a tensor takes one launch, and so does a list of tensors.

    Parameters
    ----------
    device : torch.device
        A CUDA or ROCm device.

    Attributes
    ----------
    works : bool
        Whether no launch has failed so far.  Nothing is launched after a failure.
    """

    def __init__(self, device: torch.device) -> None:
        import triton.language

        from ikkuna.numerics.statistics.device import triton_kernels

        self._kernels, self._language = triton_kernels, triton.language
        self._device = device
        self._chunks: dict[tuple[int, ...], tuple[Tensor, tuple[int, ...]]] = {}
        self._addresses: dict[tuple[int, ...], Tensor] = {}
        self._orders: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor, Tensor]] = {}
        self.works = True
        self._is_warm = False

    def accepts(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether a kernel can read the elements of `x` from memory, and there is something to measure."""
        return (
            self.works
            and x.dtype in _DTYPES
            and x.layout is torch.strided
            and not fields <= _NOTHING
            and not x.is_neg()
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())
        )

    def measure(self, row: int, x: Tensor, fields: frozenset[str]) -> Written | None:
        """Measure one tensor; ``None`` if the launch fails."""
        share = max(_CHUNK, -(-x.numel() // _PROGRAMS // _BLOCK) * _BLOCK)
        programs = -(-x.numel() // share)
        values = self._rows(programs)
        arguments = in_memory_order(x), x.numel(), values, share
        done = self._launch(self._kernels.measure_one, programs, *arguments, LEVEL=_level(fields), BLOCK=_BLOCK)
        return Written((row,) * programs, values) if done else None

    def measure_list(
        self, rows: Sequence[int], xs: Sequence[Tensor], fields: frozenset[str], minus: Sequence[Tensor] = ()
    ) -> Written | None:
        """Measure several tensors of one dtype, or their differences to as many others; ``None`` if the launch fails."""
        chunks, tensors = self._chunks_of(tuple(x.numel() for x in xs))
        addresses = tuple(x.data_ptr() for x in (*xs, *minus))
        if addresses not in self._addresses:
            if len(self._addresses) > len(_DTYPES) * 8:  # gradients may have new addresses at every step
                self._addresses.clear()
            self._addresses[addresses] = self._send(addresses)
        values = self._rows(len(tensors))
        done = self._launch(
            self._kernels.measure_list,
            len(tensors),
            *(self._addresses[addresses], len(xs), chunks, values),
            DTYPE=getattr(self._language, _DTYPES[xs[0].dtype]),
            DIFFERENCE=bool(minus),
            ALIGNED=all(address % 16 == 0 for address in addresses),
            LEVEL=_level(fields),
            BLOCK=_BLOCK,
        )
        return Written(tuple(rows[i] for i in tensors), values) if done else None

    def merge(self, written: Sequence[Written]) -> tuple[tuple[int, ...], Tensor]:
        """Return the numbers of the rows of the step, each once, and their values ``(rows, columns)`` on the device."""
        owners = tuple(owner for rows in written for owner in rows.owners)
        if owners not in self._orders:
            if len(self._orders) > 16:
                self._orders.clear()
            names = tuple(dict.fromkeys(owners))
            number = {name: i for i, name in enumerate(names)}
            order = sorted(range(len(owners)), key=lambda i: number[owners[i]])
            ends = [i for i, (a, b) in enumerate(pairwise(order), 1) if owners[a] != owners[b]]
            self._orders[owners] = names, self._send(order), self._send((0, *ends, len(order)))
        names, order_of_rows, begin = self._orders[owners]
        values = torch.cat([rows.values for rows in written]) if len(written) > 1 else written[0].values
        merged = self._rows(len(names))
        self._launch(self._kernels.merge_rows, len(names), values, order_of_rows, begin, merged, BATCH=_BATCH)
        return names, merged

    def warm_up(self) -> None:
        """Compile the kernels, which takes seconds, unless they are compiled already."""
        if self._is_warm:
            return
        self._is_warm = True
        for dtype in _DTYPES:
            x = torch.zeros(16, dtype=dtype, device=self._device)
            for fields in (frozenset(("sumsq",)), frozenset(("m2",)), frozenset(("m4",))):
                written = self.measure(0, x, fields)
                self.measure_list((0,), (x,), fields)
                self.measure_list((0,), (x,), fields, (x,))
        if self.works and written is not None:
            self.merge([written])

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> bool:
        module = torch.get_device_module(self._device)
        try:
            if self._device.index in (None, module.current_device()):
                launch(kernel, programs, *arguments, **constants)
            else:
                with module.device(self._device):
                    launch(kernel, programs, *arguments, **constants)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.works = False
            log.warning(
                "a Triton kernel failed, so torch's operators measure the tensors of %s: %s", self._device, error
            )
            return False
        return True

    def _rows(self, count: int) -> Tensor:
        return torch.empty(count, len(COLUMNS), dtype=torch.float64, device=self._device)

    def _chunks_of(self, sizes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """Return the chunks of tensors of these sizes, ``(tensor, start / block, stop)``, and the tensor of each."""
        if sizes not in self._chunks:
            chunks = [
                (tensor, start // _BLOCK, min(start + _CHUNK, size))
                for tensor, size in enumerate(sizes)
                for start in range(0, size, _CHUNK)
            ]
            self._chunks[sizes] = self._send([x for chunk in chunks for x in chunk]), tuple(i for i, _, _ in chunks)
        return self._chunks[sizes]

    def _send(self, numbers: Sequence[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu").pin_memory()
        return host.to(self._device, non_blocking=True)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel."""
    kernel[(programs,)](*arguments, num_warps=8, **constants)


@cache
def triton_kernels(device: torch.device) -> TritonKernels | None:
    """Return the kernels for a device; ``None`` if Triton is missing, or does not support the device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        return TritonKernels(device)
    except Exception as error:
        log.info("Triton cannot be used: %s", error)
        return None


def warm_up(devices: Iterable[torch.device]) -> None:
    """Compile the kernels for some devices, before the first step."""
    for device in devices:
        if device.type != "cpu" and (kernels := triton_kernels(device)) is not None:
            kernels.warm_up()


def _level(fields: frozenset[str]) -> int:
    """Return which moments the kernels compute."""
    if fields.isdisjoint(("mean", "m2", "m3", "m4")):
        return 0
    return 1 if fields.isdisjoint(("m3", "m4")) else 2
