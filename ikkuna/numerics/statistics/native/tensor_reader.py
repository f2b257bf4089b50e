"""Checks and measures tensors on the host in one native call each, or lists of them in one call."""

import ctypes
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.torch_internals import is_transformed

__all__ = ["KnownTensors", "TensorReader"]

_NAMES = (
    *("dtype", "is_cpu", "layout", "is_nested", "is_neg", "data_ptr", "numel", "itemsize", "storage_offset"),
    *("untyped_storage", "nbytes", "is_contiguous", "dim", "shape"),
)
_Flags = NDArray[np.int32]
_Rows = NDArray[np.int64]
_OBJECT, _ADDRESS = ctypes.py_object, ctypes.c_void_p


class TensorReader:
    """The functions of ``tensors.cpp``, which read tensors through their Python objects.

    A tensor is measured if `Library.accepts` it, and if it has at most 524,288 elements, in the memory order of a contiguous or
    ``channels_last`` tensor.

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
        self._objects: list[Any] = [
            *(Tensor, nn.Parameter, torch.float32, torch.float64, torch.bfloat16, torch.strided, is_transformed),
            *((), {"memory_format": torch.channels_last}, *map(sys.intern, _NAMES)),
        ]
        self._table = (ctypes.py_object * len(self._objects))(*self._objects)
        try:
            set_up, self._one = with_lock.set_up, with_lock.measure_tensor
            self._many, self._differences = with_lock.measure_tensors, with_lock.measure_differences
        except AttributeError as error:
            raise RuntimeError(f"the native library has no such function: {error}") from error
        set_up.argtypes, set_up.restype = (_ADDRESS,), ctypes.c_int
        self._one.argtypes, self._one.restype = (_OBJECT, ctypes.c_int, _ADDRESS), ctypes.c_int
        lists = (ctypes.c_int64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS)
        self._many.argtypes, self._many.restype = (_OBJECT, *lists), None
        self._differences.argtypes, self._differences.restype = (_OBJECT, _OBJECT, *lists), None
        row = np.zeros(64)
        if not set_up(ctypes.addressof(self._table)):
            raise RuntimeError("the interpreter does not export its functions")
        if not self.add(torch.ones(3, device="cpu"), 0, row.ctypes.data) or row[0] != 3:
            raise RuntimeError("the native library cannot read tensors")

    def add(self, x: Tensor, flags: int, row: int) -> bool:
        """Add the statistics of a tensor to the row at an address; return ``False`` if it cannot be read here."""
        return bool(self._one(x, flags, row))

    def add_all(
        self, tensors: list[Tensor], flags: _Flags, rows: _Rows, known: "KnownTensors | None" = None
    ) -> list[int]:
        """Add the statistics of tensors to rows; return the positions of those that cannot be read here.

        Parameters
        ----------
        tensors : list of Tensor
            Any tensors.
        flags : array of int32
            What to measure of each.
        rows : array of int64
            The addresses of their rows.
        known : KnownTensors, optional
            What was found out about the same tensors before.
        """
        done = np.zeros(len(tensors), np.uint8)
        memory = None if known is None else known.address(len(tensors))
        self._many(tensors, len(tensors), flags.ctypes.data, rows.ctypes.data, memory, done.ctypes.data)
        return [] if done.all() else np.flatnonzero(done == 0).tolist()

    def add_differences(
        self,
        tensors: list[Tensor],
        copies: list[Tensor],
        flags: _Flags,
        rows: _Rows,
        known: "KnownTensors | None" = None,
    ) -> list[int]:
        """Add the statistics of ``tensor - copy`` to rows, as :meth:`add_all`; the copies are plain tensors on the host."""
        done = np.zeros(len(tensors), np.uint8)
        memory = None if known is None else known.address(len(tensors))
        self._differences(tensors, copies, len(tensors), flags.ctypes.data, rows.ctypes.data, memory, done.ctypes.data)
        return [] if done.all() else np.flatnonzero(done == 0).tolist()


class KnownTensors:
    """Properties of the tensors of a list, which a `TensorReader` checks faster in the next call.

    Identity, type, memory, size, dtype, order and storage are checked in each call.
    """

    def __init__(self) -> None:
        self._memory = np.zeros((0, 2), np.int64)

    def address(self, count: int) -> int:
        """Return the address of the memory for a list of this length."""
        if count > len(self._memory):
            self._memory = np.zeros((count, 2), np.int64)
        return self._memory.ctypes.data
