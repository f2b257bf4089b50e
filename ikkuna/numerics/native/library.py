"""Calls the compiled kernels."""

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.statistics import Record

__all__ = ["DTYPES", "Library"]

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""What kernels take as it is; other types are widened to float32."""

_LINEAR, _SECOND, _HIGHER = 1, 2, 4
_SQUARES = frozenset(("n", "sumsq", "nans", "infs"))
_Row = ctypes.c_double * 12
_WIDENED = 1 << 20

_Kernel = Callable[..., None]


class Library:
    """The kernels of one shared library, for tensors of one axis that it `takes`; others must not be given to it.

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
        self._codes = {dtype: _typed(kernels, f"codes_{name}", _CODES) for dtype, name in DTYPES.items()}
        self._sampled = {dtype: _typed(kernels, f"sampled_codes_{name}", _SAMPLED) for dtype, name in DTYPES.items()}
        if self.measure(torch.tensor([1.0, -3.0]), frozenset(("n", "l1", "m2"))) != Record(2, m2=8.0, l1=4.0):
            raise RuntimeError("the compiled kernels compute nonsense")

    @staticmethod
    def takes(flat: Tensor) -> bool:
        """Whether the numbers of `flat` lie in memory as a kernel reads them: not those of a wrapper, a lazy negative or a lazy zero."""
        return type(flat) is Tensor and flat.is_cpu and flat.is_contiguous() and not flat.is_neg() and flat.data_ptr() != 0

    def measure(self, flat: Tensor, fields: frozenset[str]) -> Record:
        """Return the `fields` of at least one number."""
        kernel = self._measure.get(flat.dtype)
        if kernel is None:
            kernel, flat = self._measure[torch.float32], flat.float()
        row = _Row()
        kernel(flat.data_ptr(), flat.numel(), _wanted(fields), row)
        return _record(row, fields)

    def codes(self, flat: Tensor, m: int, counts: Tensor) -> None:
        """Add the float codes of some numbers to `counts`."""
        kernel = self._codes.get(flat.dtype)
        for part in (flat,) if kernel else map(Tensor.float, flat.split(_WIDENED)):
            (kernel or self._codes[torch.float32])(
                part.data_ptr(), part.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2
            )

    def sampled_codes(self, flat: Tensor, m: int, counts: Tensor, seed: int) -> None:
        """Add to `counts` the float codes of 65,536 numbers, one at random out of each of so many equal runs; of `DTYPES` alone."""
        self._sampled[flat.dtype](flat.data_ptr(), flat.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2, seed)


_MEASURE = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_CODES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SAMPLED = (*_CODES, ctypes.c_uint32)


def _typed(kernels: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> _Kernel:
    kernel: Any = getattr(kernels, name)
    kernel.argtypes, kernel.restype = arguments, None
    return kernel  # type: ignore[no-any-return]


def _wanted(fields: frozenset[str]) -> int:
    if fields <= _SQUARES:
        return 0
    if "m3" in fields or "m4" in fields:
        return _LINEAR | _HIGHER
    return _LINEAR | _SECOND if "m2" in fields else _LINEAR


def _record(row: Any, fields: frozenset[str]) -> Record:
    n, nans, infs, zeros, l1, sumsq, mean, m2, m3, m4, low, high = row
    record = Record(int(n))
    if "nans" in fields:
        record.nans, record.infs = int(nans), int(infs)
    if "sumsq" in fields:
        record.sumsq = sumsq
    if fields <= _SQUARES:
        return record
    if "mean" in fields:
        record.center = mean if n > nans + infs else math.nan
    if "m2" in fields:
        record.m2 = m2
    if "m3" in fields:
        record.m3 = m3
    if "m4" in fields:
        record.m4 = m4
    if "l1" in fields:
        record.l1 = l1
    if "zeros" in fields:
        record.zeros = int(zeros)
    if "min" in fields:
        record.min = low
    if "max" in fields:
        record.max = high
    return record
