"""The statistics kernels in C++, called through ctypes: single tensors, and lists of tensors."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.numerics.elements import in_memory_order
from ikkuna.numerics.statistics.record import EXACT_COUNTS, needed_fields
from ikkuna.numerics.statistics.table import COLUMN, EMPTY, Values
from ikkuna.support.failures import log
from ikkuna.support.native import SOURCES, build_library, joined_source, typed_function
from ikkuna.support.threads import computed_once
from ikkuna.support.torch_internals import (
    TENSOR_ADDRESS,
    is_transformed,
    native_functions,
    parallel_for,
)

_NAMES = (TENSOR_ADDRESS, "is_neg", "requires_grad")
_Flags = NDArray[np.int32]
_Rows = NDArray[np.int64]
_OBJECT, _ADDRESS, _INTEGER = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
_MEASURED, _COPIED = 1, 2
COUNTED = 4
"""What `TensorReader.add` returns beside others if it has counted the codes."""


class TensorReader:
    """The functions of ``tensors.cpp``, which read tensors through their Python objects.

    A tensor is measured if `Library.accepts` it, and if it is in the memory order of a contiguous or ``channels_last`` tensor.

    Parameters
    ----------
    library : CDLL
        The loaded library.

    Raises
    ------
    RuntimeError
        If the library lacks a function, or the interpreter one that it needs, or if its results are wrong.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        with_lock: Any = ctypes.PyDLL(library._name, handle=library._handle)  # does not release the lock of Python
        self._objects: list[Any] = [Tensor, nn.Parameter, None, *map(sys.intern, _NAMES)]
        self._table = (ctypes.py_object * len(self._objects))(*self._objects)
        functions = native_functions()
        self._functions = (ctypes.c_void_p * len(functions))(*functions)
        try:
            set_up, self._one = with_lock.set_up, with_lock.measure_tensor
            self._many, self._differences = with_lock.measure_tensors, with_lock.measure_differences
        except AttributeError as error:
            raise RuntimeError(f"the native library has no such function: {error}") from error
        set_up.argtypes, set_up.restype = (_ADDRESS, _ADDRESS), ctypes.c_int
        self._one.argtypes, self._one.restype = (_OBJECT, ctypes.c_int, _ADDRESS, _ADDRESS, _INTEGER), ctypes.c_int
        self._many.argtypes, self._many.restype = (_OBJECT, _INTEGER, *[_ADDRESS] * 6), None
        self._differences.argtypes, self._differences.restype = (_OBJECT, _INTEGER, *[_ADDRESS] * 6), None
        row, x = np.zeros(64), torch.arange(12.0, device="cpu").reshape(3, 4)
        if not set_up(ctypes.addressof(self._table), ctypes.addressof(self._functions)):
            raise RuntimeError("the interpreter does not export its functions")
        is_read = self.add(x[1:], 0, row.ctypes.data) and not self.add(x.mT, 0, row.ctypes.data)
        if not is_read or row[COLUMN["n"]] != 8 or row[COLUMN["sumsq"]] != 492:
            raise RuntimeError("the native library cannot read tensors")

    def add(self, x: Tensor, flags: int, row: int, counts: int | None = None, most_counted: int = -1) -> int:
        """Add the statistics of a tensor to the row at an address, and count its codes if it has at most `most_counted` elements.

        Returns 0 if the tensor cannot be read here; otherwise the bit `COUNTED` is set if the counts are at the address `counts`.
        """
        return int(self._one(x, flags, row, counts, most_counted))

    def add_all(
        self, tensors: list[Any], flags: _Flags, rows: _Rows, memory: "ListMemory", counted: _Rows | None = None
    ) -> NDArray[np.intp]:
        """Add the statistics of tensors to different rows; return the positions of those that are left to Python.

        Parameters
        ----------
        tensors : list of Tensor or None
            Any tensors; ``None`` is passed over.
        flags : array of int32
            What to measure of each, `NOTHING`, `PYTHON` or `READABLE`.
        rows : array of int64
            The addresses of their rows.
        memory : ListMemory
            What is known of the list from earlier calls.  If it has places for copies, the tensors are copied as well.
        counted : array of int64, optional
            ``(tensors, 2)``, where the codes of each are counted, or 0, and the seed of its sample; -1 to count all elements.
        """
        places = None if counted is None else counted.ctypes.data
        self._many(tensors, len(tensors), flags.ctypes.data, rows.ctypes.data, places, *memory.addresses)
        is_left: NDArray[np.bool_] = ((memory.done & _MEASURED) == 0) & (flags != NOTHING)
        return is_left.nonzero()[0]

    def add_differences(
        self, tensors: list[Any], flags: _Flags, rows: _Rows, memory: "ListMemory", counted: _Rows | None = None
    ) -> NDArray[np.intp]:
        """Add the statistics of the differences of tensors and their copies, which `add_all` has made, to rows.

        Returns the positions of those that are not what they were when they were copied.
        """
        assert memory.copies is not None
        is_copied = memory.is_copied
        places = None if counted is None else counted.ctypes.data
        self._differences(tensors, len(tensors), flags.ctypes.data, rows.ctypes.data, places, *memory.addresses)
        is_lost: NDArray[np.bool_] = is_copied & (memory.done == 0)
        return is_lost.nonzero()[0]


class ListMemory:
    """Memory of a `TensorReader` for a list of tensors between two calls.

    Identity, type, memory, size, dtype, order and storage of each tensor are checked in each call.

    Parameters
    ----------
    count : int
        The number of tensors.
    sizes : sequence of int, optional
        The numbers of bytes of tensors that are copied; 0 for those that are not.

    Attributes
    ----------
    addresses : tuple of int or None
        Where the native functions find what is known of the tensors, their copies, and what was done.
    """

    def __init__(self, count: int, sizes: Sequence[int] | None = None) -> None:
        self.known: _Rows = np.zeros((count, 2), np.int64)
        self.done: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.copies: _Rows | None = None
        if sizes is not None:
            self.copies = np.zeros((count, 5), np.int64)
            self.copies[:, 1] = sizes
        arrays = self.known, self.copies, self.done
        self.addresses = tuple(None if array is None else int(array.ctypes.data) for array in arrays)

    @property
    def is_copied(self) -> NDArray[np.bool_]:
        """Whether each tensor was copied."""
        return (self.done & _COPIED) > 0

    def copy_to(self, addresses: _Rows | int) -> None:
        """Set where the tensors are copied to; 0 for those that are not copied."""
        assert self.copies is not None
        self.copies[:, 0] = addresses


NOTHING, PYTHON, READABLE = -1, -2, -3
"""Entries of the table of what is measured of a row: nothing, something that is measured in Python, and nothing but whether a tensor
of a list can be read."""


DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""The dtypes that the kernels read, and the names of these in the library."""

VARIANTS = {"avx512": 64, "avx2": 32, "portable": 16}
"""The variants of the kernels, the fastest first, and the bytes of their vectors."""

_LINEAR, _HIGHER = 1, 2
_SQUARES = needed_fields(("sumsq",))
_PLAIN = frozenset((Tensor, nn.Parameter))
_STRIDED = torch.strided

T = TypeVar("T")


class Library:
    """The kernels of one shared library.

    They add statistics to rows of a table (see `ikkuna.numerics.statistics.table`), given by their addresses.
    A tensor must be one that the library `accepts`.
    The fastest of the `VARIANTS` that this processor can run is used, or that of the environment variable ``IKKUNA_KERNELS``.
    They have the same results to the last bit.
    Sums of 1,024 numbers are computed in their own precision, at least float32, and added in float64: norms, sums of magnitudes and
    variances have a relative error below 1e-6, and a mean an error below 1e-7 standard deviations.

    Parameters
    ----------
    kernels : CDLL
        The loaded library.

    Attributes
    ----------
    reader : TensorReader or None
        Checks and measures tensors in one call, if the library can do it with this interpreter.
    addresses : list of int
        The addresses of the kernels of float32, float64 and bfloat16, and of the function that merges rows, for other native functions.

    Raises
    ------
    RuntimeError
        If it lacks a kernel, or if its results are wrong.
    """

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._measure = {dtype: typed_function(kernels, f"measure_{name}", _MEASURE) for dtype, name in DTYPES.items()}
        self._difference = {
            dtype: typed_function(kernels, f"measure_difference_{name}", _DIFFERENCE) for dtype, name in DTYPES.items()
        }
        self._codes = {dtype: typed_function(kernels, f"codes_{name}", _CODES) for dtype, name in DTYPES.items()}
        self._sampled = {
            dtype: typed_function(kernels, f"sampled_codes_{name}", _SAMPLED) for dtype, name in DTYPES.items()
        }
        self._bit_sum = typed_function(
            kernels, "bit_sum_of_words", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int), ctypes.c_int64
        )
        self.quantiles = typed_function(kernels, "quantiles", (*[_ADDRESS] * 2, _INTEGER, _ADDRESS), ctypes.c_int)
        self.buckets = typed_function(kernels, "buckets", (*[_ADDRESS] * 2, _INTEGER, *[_ADDRESS] * 5), ctypes.c_int)
        self.weigh = typed_function(kernels, "weigh", (_ADDRESS,) * 4)
        typed_function(kernels, "set_parallel_for", (ctypes.c_void_p,))(parallel_for())
        self._use_vectors = typed_function(kernels, "use_vectors", (ctypes.c_int,), ctypes.c_int)
        wanted = os.environ.get("IKKUNA_KERNELS")
        if wanted is None or not (wanted in VARIANTS and self.use(wanted)):
            used = next(filter(self.use, VARIANTS))
            if wanted is not None:
                log.warning(
                    "IKKUNA_KERNELS=%s is not one of %s, or this processor lacks it; using %s",
                    wanted,
                    [*VARIANTS],
                    used,
                )
        row = self.measure(torch.tensor([1.0, -3.0], device="cpu"), frozenset(("n", "l1", "m2")))
        if [row[COLUMN[name]] for name in ("n", "l1", "mean", "m2")] != [2, 4, -1, 8]:
            raise RuntimeError("the native kernels compute wrong results")
        self.reader = _made(TensorReader, kernels)
        functions: list[Any] = [*self._measure.values(), typed_function(kernels, "merge_records", ())]
        kept = (ctypes.cast(function, _ADDRESS).value for function in functions)
        self.addresses = [address for address in kept if address is not None]

    def use(self, variant: str) -> bool:
        """Use another of the `VARIANTS`, all of which have the same results; return whether this processor has its instructions."""
        return bool(self._use_vectors(VARIANTS[variant]))

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
        return is_alike and self.accepts(x) and self.accepts(y)

    def add_difference(self, x: Tensor, y: Tensor, fields: frozenset[str], row: int) -> None:
        """Add the `fields` of ``x - y`` to the row at an address, without a tensor for the difference."""
        self._difference[x.dtype](x.data_ptr(), y.data_ptr(), x.numel(), flags_of(fields), row)

    def codes(self, x: Tensor, m: int, counts: Tensor) -> None:
        """Overwrite `counts` with the counts of the float codes of `x`."""
        self._codes[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2)

    def bit_sum(self, words: Tensor) -> int:
        """Return the weighted sum of contiguous integers of 8, 16 or 32 bits, see `ikkuna.numerics.bits`."""
        return int(self._bit_sum(words.data_ptr(), words.numel(), words.element_size()))

    def sampled_codes(self, x: Tensor, m: int, counts: Tensor, seed: int) -> None:
        """Overwrite `counts` with those of 65,536 elements, one at random out of each of so many equal runs, scaled to all of `x`."""
        self._sampled[x.dtype](x.data_ptr(), x.numel(), 23 - m, counts.data_ptr(), counts.numel() // 2, seed)


_MEASURE = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p)
_DIFFERENCE = (ctypes.c_void_p, *_MEASURE)
_CODES = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SAMPLED = (*_CODES, ctypes.c_uint32)


@cache
def flags_of(fields: frozenset[str]) -> int:
    """Return what the kernels have to measure, as they take it."""
    fields -= {EXACT_COUNTS}  # the kernels always count
    if fields <= _SQUARES:
        return 0
    return _LINEAR | _HIGHER if "m3" in fields or "m4" in fields else _LINEAR


def _made(part: Callable[[ctypes.CDLL], T], kernels: ctypes.CDLL) -> T | None:
    try:
        return part(kernels)
    except RuntimeError as error:
        log.debug("tensors are checked in Python: %s", error)
        return None


@computed_once
def library() -> Library | None:
    """Return the native kernels; ``None``, after one line in the log, if there is no compiler or the library cannot be loaded.

    See :func:`ikkuna.support.native.build_library`.
    """
    try:
        return build_library(joined_source(*SOURCES["kernels"]), Library)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        log.warning("statistics are measured with numpy, which costs more: %s", reason[0] if reason else error)
        return None
