"""Launches the Triton kernels on CUDA and ROCm devices."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ikkuna.logger import log
from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.device.code_counts import CODES, CountBuffer
from ikkuna.numerics.statistics.device.kernel_tables import BLOCK, KernelTables, TensorList, shares_of
from ikkuna.numerics.statistics.device.row_buffers import RowBuffers, Written
from ikkuna.numerics.statistics.float_code import SAMPLE
from ikkuna.numerics.statistics.table import COLUMNS, merge_rows
from ikkuna.torch_internals import is_transformed

__all__ = ["DTYPES", "TritonKernels", "launch", "level_of", "triton_kernels"]

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels read, and their names in Triton."""

_DRAWN = 1024  # elements that a program draws
_BATCH = 128
_BINS = 512  # of a histogram that a program merges
_LIMIT = (1 << 31) - 1  # of a count
_DROPPED = -1  # stands for a histogram that was cleared
_NUMBER = frozenset(("n",))
_PLAIN = (Tensor, torch.nn.Parameter)


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
    warm : set
        The variants that are compiled, see `warm_up`.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernels, self._language = self.import_kernels()
        self.device = device
        self._index, self._module = device.index, torch.get_device_module(device)
        self._tables = KernelTables(device)
        self._no_counts = torch.zeros(1, dtype=torch.int32, device=device)
        self.works = True
        self.warm: set[Any] = set()

    @staticmethod
    def import_kernels() -> tuple[Any, Any]:
        """Return the module of the kernels, and Triton's language; raise an error if there is no Triton."""
        import triton.language

        from ikkuna.numerics.statistics.device import kernels

        return kernels, triton.language

    def accepts(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether a kernel can read the elements of `x` from memory, and there is something to measure."""
        return (
            self.works
            and x.dtype in DTYPES
            and x.layout is torch.strided
            and not fields <= _NUMBER
            and not x.is_neg()
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())
            and x.numel() <= _LIMIT
        )

    def takes(self, x: Tensor) -> bool:
        """Return whether `measure` can measure a tensor that nothing is known of.

        The answer is ``False`` for some tensors that it can measure, such as transposed ones.
        """
        return (
            self.works
            and type(x) in _PLAIN
            and x.dtype in DTYPES
            and x.layout is torch.strided
            and x.is_contiguous()
            and not is_transformed(x)
            and 0 < (n := x.numel()) <= _LIMIT
            and x.data_ptr() % 16 == 0
            and (x.storage_offset() + n) * x.itemsize <= x.untyped_storage().nbytes()
            and not x.is_neg()
        )

    def accepts_one(self, x: Tensor, fields: frozenset[str]) -> bool:
        """Return whether `measure` can measure a tensor; the kernel for one tensor is compiled for aligned ones alone."""
        return self.accepts(x, fields) and x.data_ptr() % 16 == 0

    def measure(
        self,
        row: int,
        x: Tensor,
        fields: frozenset[str],
        counts: Tensor | None = None,
        reserve: Callable[[int], Tensor] | None = None,
    ) -> Written | None:
        """Measure one tensor, and add its float codes to the histograms `counts`; ``None`` if the launch fails.

        The rows are written to the memory that `reserve` returns, by default to new memory.
        """
        share, programs = shares_of(n := x.numel())
        values = (reserve or self._rows)(programs)
        done = self._launch(
            self._kernels.measure_one,
            programs,
            *(x if x.is_contiguous() else in_memory_order(x), n, values, share),
            *((self._no_counts, 1) if counts is None else (counts, len(counts))),
            COUNT=counts is not None,
            LEVEL=level_of(fields),
            BLOCK=BLOCK,
        )
        return Written((row,) * programs, values) if done else None

    def sample(self, x: Tensor, counts: Tensor, seed: int) -> bool:
        """Add the float codes of a sample to a histogram; return whether the launch succeeds."""
        arguments = x if x.is_contiguous() else in_memory_order(x), x.numel(), counts, seed
        return self._launch(self._kernels.sample_one, SAMPLE // _DRAWN, *arguments, BLOCK=_DRAWN)

    def measure_list(
        self,
        rows: Sequence[int],
        tensors: TensorList,
        fields: frozenset[str],
        reserve: Callable[[int], Tensor] | None = None,
    ) -> Written | None:
        """Measure several tensors of one dtype as `measure` does."""
        xs, others, chunks = tensors.xs, tensors.others, self._tables.chunks_of(tensors)
        addresses, are_aligned = self._tables.addresses_of(tensors)
        values = (reserve or self._rows)(len(chunks.tensors))
        has_counts = tensors.counts is not None
        done = self._launch(
            self._kernels.measure_list,
            len(chunks.tensors),
            *(addresses, len(xs), chunks.values, values, tensors.counts if has_counts else self._no_counts),
            DTYPE=getattr(self._language, DTYPES[xs[0].dtype]),
            OTHER=0 if not others else 2 if tensors.copies else 1,
            ALIGNED=are_aligned,
            COUNT=has_counts,
            LEVEL=level_of(fields),
            BLOCK=BLOCK,
        )
        return Written(tuple(rows[i] for i in chunks.tensors), values) if done else None

    def sample_list(self, tensors: TensorList, drawn: Sequence[int], counts: Tensor, seed: int) -> bool:
        """Add the float codes of samples of the tensors numbered `drawn` to a histogram each; return whether it succeeds."""
        table = self._tables.drawn_of(tensors, drawn)
        return self._launch(
            self._kernels.sample_list,
            len(drawn) * (SAMPLE // _DRAWN),
            *(self._tables.addresses_of(tensors)[0], len(tensors.xs), table, counts, seed),
            DTYPE=getattr(self._language, DTYPES[tensors.xs[0].dtype]),
            DIFFERENCE=bool(tensors.others) and not tensors.copies,
            BLOCK=_DRAWN,
        )

    def merge(self, written: Sequence[Written]) -> tuple[tuple[int, ...], Tensor]:
        """Return the numbers of the rows of the step, each once, and their values ``(rows, columns)`` on the device."""
        owners = tuple(owner for rows in written for owner in rows.owners)
        names, order, begin = self._tables.order_of(owners)
        values = RowBuffers.together(written)
        merged = self._rows(len(names))
        if not self._launch(self._kernels.merge_rows, len(names), values, order, begin, merged, BATCH=_BATCH):
            parts = [torch.stack([x for x, o in zip(values, owners, strict=True) if o == name]) for name in names]
            merged = torch.stack([merge_rows(part) for part in parts])
        return names, merged

    def merge_counts(self, buffers: Sequence[CountBuffer]) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], Tensor]:
        """Return whose histograms there are, as row and fields, and their counts ``(histograms, codes)``, int64."""
        owners = [owner for buffer in buffers for owner in buffer.owners]
        several = [buffer.counts[: len(buffer.owners)] for buffer in buffers] if len(buffers) > 1 else []
        counts = torch.cat(several) if several else buffers[0].counts
        keys = tuple((_DROPPED, ()) if owner is None else owner[:2] for owner in owners)
        scales = tuple(0.0 if owner is None else owner.scale for owner in owners)
        names, order, begin = self._tables.order_of(keys)
        merged = torch.empty(len(names), CODES, dtype=torch.int64, device=self.device)
        arguments = counts, order, begin, self._tables.scales_of(scales), merged
        if not self._launch(self._kernels.merge_codes, len(names) * (CODES // _BINS), *arguments, BLOCK=_BINS):
            scaled = [(x * scale).round().long() for x, scale in zip(counts.double(), scales, strict=False)]
            groups = [[x for x, key in zip(scaled, keys, strict=True) if key == name] for name in names]
            merged = torch.stack([torch.stack(group).sum(0) for group in groups])
        return names, merged

    def _launch(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> bool:
        try:
            if self._index is None or self._module.current_device() == self._index:
                launch(kernel, programs, *arguments, **constants)
            else:
                with self._module.device(self.device):
                    launch(kernel, programs, *arguments, **constants)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.works = False
            log.warning(
                "a Triton kernel failed, so torch's operators measure the tensors of %s: %s", self.device, error
            )
            return False
        return True

    def _rows(self, count: int) -> Tensor:
        return torch.empty(count, len(COLUMNS), dtype=torch.float64, device=self.device)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; `enable_fp_fusion` has a default that depends on the version of Triton, and a warning."""
    kernel[(programs,)](*arguments, num_warps=8, enable_fp_fusion=True, **constants)


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


@cache
def level_of(fields: frozenset[str]) -> int:
    """Return which moments the kernels compute."""
    if fields.isdisjoint(("mean", "m2", "m3", "m4")):
        return 0
    return 1 if fields.isdisjoint(("m3", "m4")) else 2
