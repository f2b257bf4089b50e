"""Calls the compiled kernels."""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.native.look import Look, record_of
from ikkuna.numerics.statistics.record import Record, closure

__all__ = ["DTYPES", "Library"]

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""What the kernels read."""

_SUBTRACTED = (torch.float32, torch.float64)

_LINEAR, _SECOND, _HIGHER, _EXTREMES = 1, 2, 4, 8
_SQUARES = closure(("sumsq",))
_SUMMED = frozenset(("mean", "m2", "m3", "m4", "l1", "zeros"))
_PART = 1 << 19
_PLAIN = frozenset((Tensor, nn.Parameter))

_Kernel = Callable[..., None]


class Library:
    """The kernels of one shared library, for tensors that it `takes`; others must not be given to it.

    Parameters
    ----------
    path : the library

    Raises
    ------
    OSError
        If it cannot be loaded.
    RuntimeError
        If it computes nonsense.
    """

    def __init__(self, path: Path) -> None:
        kernels = ctypes.CDLL(str(path))
        self._measure = {dtype: _typed(kernels, f"measure_{name}", _MEASURE) for dtype, name in DTYPES.items()}
        self._difference = {
            dtype: _typed(kernels, f"measure_difference_{DTYPES[dtype]}", _DIFFERENCE) for dtype in _SUBTRACTED
        }
        self._codes = {dtype: _typed(kernels, f"codes_{name}", _CODES) for dtype, name in DTYPES.items()}
        self._sampled = {dtype: _typed(kernels, f"sampled_codes_{name}", _SAMPLED) for dtype, name in DTYPES.items()}
        self._merge = _typed(kernels, "merge_records", _MERGE)
        if self.measure(torch.tensor([1.0, -3.0]), frozenset(("n", "l1", "m2"))) != Record(2, m2=8.0, l1=4.0):
            raise RuntimeError("the compiled kernels compute nonsense")

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether the numbers of `x` lie in memory as a kernel reads them: not those of a wrapper, a lazy negative or a lazy zero."""
        return (
            type(x) in _PLAIN
            and x.dtype in DTYPES
            and x.is_cpu
            and x.layout is torch.strided
            and not x.is_nested
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())  # ``channels_last`` is as good
            and not x.is_neg()
            and not torch._C._functorch.is_functorch_wrapped_tensor(x)
            and x.data_ptr() != 0  # of no number, too
        )

    def measure(self, x: Tensor, fields: frozenset[str]) -> Record:
        """Return the `fields` of the numbers of `x`."""
        look = Look()
        self.look(x, fields, look)
        return record_of(look, fields) or Record()

    def look(self, x: Tensor, fields: frozenset[str], look: Look) -> None:
        """Add the `fields` of the numbers of `x` to a look; parts of many are measured by as many threads as torch has."""
        kernel, wanted, begin, n = self._measure[x.dtype], _wanted(fields), x.data_ptr(), x.numel()
        if n <= _PART:
            kernel(begin, n, wanted, look)
            return
        size = x.element_size()
        parts = [(Look(), first) for first in range(0, n, _PART)]
        _each(lambda part, first: kernel(begin + first * size, min(n - first, _PART), wanted, part), parts)
        for part, _ in parts:
            self._merge(part, wanted, look)

    def takes_difference(self, x: Tensor, y: Tensor) -> bool:
        """Whether a kernel reads the difference of `x` and `y`."""
        is_alike = x.dtype is y.dtype and x.shape == y.shape and x.stride() == y.stride()
        return x.dtype in _SUBTRACTED and is_alike and self.takes(x) and self.takes(y)

    def look_at_difference(self, x: Tensor, y: Tensor, fields: frozenset[str], look: Look) -> None:
        """Add the `fields` of ``x - y``, which is never made: two looks at memory where a subtraction and a measurement are four."""
        self._difference[x.dtype](x.data_ptr(), y.data_ptr(), x.numel(), _wanted(fields), look)

    def codes(self, x: Tensor, m: int, counts: Tensor) -> None:
        """Fill `counts`, whatever it holds, with those of the float codes of `x`."""
        self._codes[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2)

    def sampled_codes(self, x: Tensor, m: int, counts: Tensor, seed: int) -> None:
        """Fill `counts` from 65,536 numbers, one at random out of each of so many equal runs, scaled to all numbers of `x`."""
        self._sampled[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2, seed)


_MERGE = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_MEASURE = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_DIFFERENCE = (ctypes.c_void_p, *_MEASURE)
_CODES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SAMPLED = (*_CODES, ctypes.c_uint32)


def _each(part: Callable[[Any, int], None], rows: list[tuple[Any, int]]) -> None:
    """Measure parts, at once if there are threads; they, and so the result, are the same in any case."""
    threads = torch.get_num_threads()
    run = map if threads == 1 else _pool(threads, os.getpid()).map
    for _ in run(part, *zip(*rows, strict=True)):
        pass


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return the threads of this process; those of a parent do not outlive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="ikkuna")


def _typed(kernels: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> _Kernel:
    kernel: Any = getattr(kernels, name)
    kernel.argtypes, kernel.restype = arguments, None
    return kernel  # type: ignore[no-any-return]


@cache
def _wanted(fields: frozenset[str]) -> int:
    if fields <= _SQUARES:
        return 0
    if fields.isdisjoint(_SUMMED):
        return _EXTREMES
    if "m3" in fields or "m4" in fields:
        return _LINEAR | _HIGHER
    return _LINEAR | _SECOND if "m2" in fields else _LINEAR
