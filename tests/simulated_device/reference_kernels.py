"""The Triton kernels in numpy: the same arguments and results, for tests of the code that launches them."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.numerics.statistics import FIELDS, needed_fields
from ikkuna.numerics.statistics.float_code import codes
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.numerics.statistics.table import EMPTY
from ikkuna.numerics.statistics.table import merge_rows as merged_rows

__all__ = ["DTYPES", "measure_list", "measure_one", "merge_codes", "merge_rows", "mixed", "sample_list", "sample_one"]

_ALL = needed_fields([name for name in FIELDS if "codes" not in name])
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PARTS = 1 << 16


def _row(x: Tensor) -> Tensor:
    statistics = HostStatistics()
    statistics.add(0, x, _ALL)
    return torch.from_numpy(statistics.values[0].copy())


def _at(address: int, n: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def measure_one(x: Tensor, n: int, rows: Tensor, share: int, counts: Tensor, histograms: int, **constants: Any) -> None:
    """Measure one tensor."""
    flat = x.as_strided((n,), (1,))
    for program, part in enumerate(flat.split(share * constants["BLOCK"])):
        rows[program] = _row(part)
        if constants["COUNT"]:
            counts[program % histograms] += codes(part).int()


def _pair(pointers: Tensor, count: int, tensor: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    addresses = pointers.tolist()
    other = addresses[count + tensor] if len(addresses) > count else 0
    return _at(addresses[tensor], n, dtype), _at(other, n, dtype) if other else None


def measure_list(
    pointers: Tensor, count: int, chunks: Tensor, rows: Tensor, counts: Tensor, DTYPE: Any, OTHER: int, **constants: Any
) -> None:
    """Measure several tensors, or their differences, or copy them."""
    for program, (tensor, start, stop, histogram) in enumerate(chunks.view(-1, 4).tolist()):
        x, y = (
            None if z is None else z[start * constants["BLOCK"] : stop]
            for z in _pair(pointers, count, tensor, stop, DTYPES[DTYPE.name])
        )
        assert x is not None
        if OTHER == 2 and y is not None:
            y.copy_(x)
        elif OTHER == 1:
            assert y is not None
            x = x.float() - y.float()
        rows[program] = _row(x)
        if constants["COUNT"] and histogram >= 0:
            counts[histogram] += codes(x).int()


def mixed(h: Any) -> Any:
    """Return the finalizer of MurmurHash3 of 32 bits."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def _drawn(n: int, seed: int) -> Tensor:
    i = np.arange(PARTS, dtype=np.int64)
    begin, end = (i * n) >> 16, ((i + 1) * n) >> 16
    random = mixed(((i * 0x9E3779B9) + seed).astype(np.uint64) & 0xFFFFFFFF).astype(np.int64)
    return torch.from_numpy(begin + ((random * (end - begin)) >> 32))


def sample_one(x: Tensor, n: int, counts: Tensor, seed: int, **constants: Any) -> None:
    """Count a sample of one tensor."""
    counts[0] += codes(x.as_strided((n,), (1,))[_drawn(n, seed)]).int()


def sample_list(
    pointers: Tensor,
    count: int,
    drawn: Tensor,
    counts: Tensor,
    seed: int,
    DTYPE: Any,
    DIFFERENCE: bool,
    **constants: Any,
) -> None:
    """Count samples of several tensors, or of their differences."""
    for tensor, n, histogram in drawn.view(-1, 3).tolist():
        x, y = _pair(pointers, count, tensor, n, DTYPES[DTYPE.name])
        at = _drawn(n, mixed((seed + tensor) & 0xFFFFFFFF))
        counts[histogram] += codes(x[at].float() - y[at].float() if DIFFERENCE and y is not None else x[at]).int()


def merge_rows(rows: Tensor, order: Tensor, begin: Tensor, merged: Tensor, **constants: Any) -> None:
    """Merge the rows of each site."""
    for i, (first, last) in enumerate(zip(begin.tolist(), begin.tolist()[1:], strict=False)):
        parts = rows[order[first:last]].numpy()
        merged[i] = torch.from_numpy(merged_rows(parts) if len(parts) else EMPTY)


def merge_codes(counts: Tensor, order: Tensor, begin: Tensor, scales: Tensor, merged: Tensor, **constants: Any) -> None:
    """Merge the histograms of each site."""
    for i, (first, last) in enumerate(zip(begin.tolist(), begin.tolist()[1:], strict=False)):
        numbers = order[first:last]
        merged[i] = (counts[numbers].double() * scales[numbers][:, None]).round().long().sum(0)
