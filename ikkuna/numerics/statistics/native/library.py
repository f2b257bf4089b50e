"""Calls the C++ kernels."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ikkuna.logger import log
from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.native.hook_functions import HookFunctions
from ikkuna.numerics.statistics.native.tensor_reader import TensorReader
from ikkuna.numerics.statistics.record import EXACT_COUNTS, closure
from ikkuna.numerics.statistics.table import COLUMN, EMPTY, Values
from ikkuna.torch_internals import is_transformed, parallel_for

__all__ = ["DTYPES", "Library", "flags_of"]

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels read, and the names of these in the library."""

_SUBTRACTED = (torch.float32, torch.float64)

_LINEAR, _HIGHER, _EXTREMES = 1, 2, 4
_SQUARES = closure(("sumsq",))
_SUMMED = frozenset(("mean", "m2", "m3", "m4", "l1", "zeros"))
_PLAIN = frozenset((Tensor, nn.Parameter))
_STRIDED = torch.strided

_Kernel = Callable[..., None]
T = TypeVar("T")


class Library:
    """The kernels of one shared library.

    They add statistics to rows of a table (see `ikkuna.numerics.statistics.table`), given by their addresses.
    A tensor must be one that the library `accepts`.

    Parameters
    ----------
    kernels : CDLL
        The loaded library.

    Attributes
    ----------
    reader : TensorReader or None
        Checks and measures tensors in one call, if the library can do it with this interpreter.
    hook_functions : HookFunctions or None
        Creates functions that hooks call first, if the library can do it with this interpreter and version of torch.

    Raises
    ------
    RuntimeError
        If it lacks a kernel, or if its results are wrong.
    """

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._measure = {dtype: _typed(kernels, f"measure_{name}", _MEASURE) for dtype, name in DTYPES.items()}
        self._difference = {
            dtype: _typed(kernels, f"measure_difference_{DTYPES[dtype]}", _DIFFERENCE) for dtype in _SUBTRACTED
        }
        self._codes = {dtype: _typed(kernels, f"codes_{name}", _CODES) for dtype, name in DTYPES.items()}
        self._sampled = {dtype: _typed(kernels, f"sampled_codes_{name}", _SAMPLED) for dtype, name in DTYPES.items()}
        _typed(kernels, "set_parallel_for", (ctypes.c_void_p,))(parallel_for())
        row = self.measure(torch.tensor([1.0, -3.0], device="cpu"), frozenset(("n", "l1", "m2")))
        if [row[COLUMN[name]] for name in ("n", "l1", "mean", "m2")] != [2, 4, -1, 8]:
            raise RuntimeError("the native kernels compute wrong results")
        self.reader = _made(TensorReader, kernels)
        self.hook_functions = _made(HookFunctions, kernels) if self.reader is not None else None

    @staticmethod
    def accepts(x: Tensor) -> bool:
        """Return whether a kernel can read the elements of `x` from memory.

        It cannot for wrappers, lazy negatives, lazy zeros, and tensors whose storage was shrunk or freed.
        """
        return (
            type(x) in _PLAIN
            and x.dtype in DTYPES
            and x.is_cpu
            and x.layout is _STRIDED
            and not x.is_nested
            and not x.is_neg()
            and not is_transformed(x)
            and x.data_ptr() != 0  # a tensor without elements has no address
            and x.nbytes + x.storage_offset() * x.itemsize <= x.untyped_storage().nbytes()
            and (x.is_contiguous() or in_memory_order(x).is_contiguous())  # ``channels_last``, for example
        )

    def measure(self, x: Tensor, fields: frozenset[str]) -> Values:
        """Return the row of the elements of `x`."""
        row = EMPTY.copy()
        self.add(x, fields, row.ctypes.data)
        return row

    def add(self, x: Tensor, fields: frozenset[str], row: int) -> None:
        """Add the `fields` of `x` to the row at an address; parts of large tensors run in torch's threads.

        The number of threads does not change the result.
        """
        self._measure[x.dtype](x.data_ptr(), x.numel(), flags_of(fields), row)

    def try_add(self, x: Tensor, fields: frozenset[str], row: int) -> bool:
        """Add the `fields` of `x` to the row at an address, if the library accepts `x`; return whether it does."""
        if self.reader is not None and self.reader.add(x, flags_of(fields), row):
            return True
        if not self.accepts(x):
            return False
        self.add(x, fields, row)
        return True

    def accepts_difference(self, x: Tensor, y: Tensor) -> bool:
        """Return whether a kernel can read the difference of `x` and `y`."""
        is_alike = x.dtype is y.dtype and x.shape == y.shape and x.stride() == y.stride()
        return x.dtype in _SUBTRACTED and is_alike and self.accepts(x) and self.accepts(y)

    def add_difference(self, x: Tensor, y: Tensor, fields: frozenset[str], row: int) -> None:
        """Add the `fields` of ``x - y`` to the row at an address, without a tensor for the difference."""
        self._difference[x.dtype](x.data_ptr(), y.data_ptr(), x.numel(), flags_of(fields), row)

    def codes(self, x: Tensor, m: int, counts: Tensor) -> None:
        """Overwrite `counts` with the counts of the float codes of `x`."""
        self._codes[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2)

    def sampled_codes(self, x: Tensor, m: int, counts: Tensor, seed: int) -> None:
        """Overwrite `counts` with those of 65,536 elements, one at random out of each of so many equal runs, scaled to all of `x`."""
        self._sampled[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2, seed)


_MEASURE = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_DIFFERENCE = (ctypes.c_void_p, *_MEASURE)
_CODES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SAMPLED = (*_CODES, ctypes.c_uint32)


def _typed(kernels: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> _Kernel:
    try:
        kernel: Any = getattr(kernels, name)
    except AttributeError as error:
        raise RuntimeError(f"the native library has no function {name}") from error
    kernel.argtypes, kernel.restype = arguments, None
    return kernel  # type: ignore[no-any-return]


@cache
def flags_of(fields: frozenset[str]) -> int:
    """Return what the kernels have to measure, as they take it."""
    fields -= {EXACT_COUNTS}  # the kernels always count
    if fields <= _SQUARES:
        return 0
    if fields.isdisjoint(_SUMMED):
        return _EXTREMES
    return _LINEAR | _HIGHER if "m3" in fields or "m4" in fields else _LINEAR


def _made(part: Callable[[ctypes.CDLL], T], kernels: ctypes.CDLL) -> T | None:
    try:
        return part(kernels)
    except RuntimeError as error:
        log.debug("tensors are checked in Python: %s", error)
        return None
