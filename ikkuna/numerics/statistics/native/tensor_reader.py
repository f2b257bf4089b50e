"""Checks and measures tensors on the host in one native call each, or lists of them in one call."""

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.numerics.statistics.table import COLUMN
from ikkuna.torch_internals import (
    BACKWARD_HOOKS,
    BASE,
    GLOBAL_FORWARD_HOOKS,
    REGISTER_HOOKS,
    TENSOR_ADDRESS,
    function_transforms,
    graph_task,
    native_functions,
    tracing_state,
)

__all__ = ["HOOK_KEY", "ListMemory", "TensorReader"]

_NAMES = (TENSOR_ADDRESS, "is_neg", "requires_grad", "grad_fn", BASE, BACKWARD_HOOKS, REGISTER_HOOKS)
_Flags = NDArray[np.int32]
_Rows = NDArray[np.int64]
_OBJECT, _ADDRESS, _INTEGER = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
_MEASURED, _COPIED = 1, 2

HOOK_KEY = -1
"""The key of a hook of ikkuna in the hooks of a tensor; torch numbers its hooks from 0."""


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
        self._objects: list[Any] = [
            *(Tensor, nn.Parameter, None, HOOK_KEY, OrderedDict, function_transforms, tracing_state, graph_task),
            *(GLOBAL_FORWARD_HOOKS, sys.getrefcount, *map(sys.intern, _NAMES)),
        ]
        self._table = (ctypes.py_object * len(self._objects))(*self._objects)
        functions = native_functions()
        self._functions = (ctypes.c_void_p * len(functions))(*functions)
        try:
            set_up, self._one = with_lock.set_up, with_lock.measure_tensor
            self._many, self._differences = with_lock.measure_tensors, with_lock.measure_differences
        except AttributeError as error:
            raise RuntimeError(f"the native library has no such function: {error}") from error
        set_up.argtypes, set_up.restype = (_ADDRESS, _ADDRESS), ctypes.c_int
        self._one.argtypes, self._one.restype = (_OBJECT, ctypes.c_int, _ADDRESS), ctypes.c_int
        self._many.argtypes, self._many.restype = (_OBJECT, _INTEGER, *[_ADDRESS] * 5), None
        self._differences.argtypes, self._differences.restype = (_OBJECT, _INTEGER, *[_ADDRESS] * 5), None
        row, x = np.zeros(64), torch.arange(12.0, device="cpu").reshape(3, 4)
        if not set_up(ctypes.addressof(self._table), ctypes.addressof(self._functions)):
            raise RuntimeError("the interpreter does not export its functions")
        is_read = self.add(x[1:], 0, row.ctypes.data) and not self.add(x.mT, 0, row.ctypes.data)
        if not is_read or row[COLUMN["n"]] != 8 or row[COLUMN["sumsq"]] != 492:
            raise RuntimeError("the native library cannot read tensors")

    def add(self, x: Tensor, flags: int, row: int) -> bool:
        """Add the statistics of a tensor to the row at an address.

        Returns ``False`` if the tensor cannot be read here.
        """
        return bool(self._one(x, flags, row))

    def add_all(self, tensors: list[Any], flags: _Flags, rows: _Rows, memory: "ListMemory") -> NDArray[np.intp]:
        """Add the statistics of tensors to different rows; return the positions of those that cannot be read here.

        Parameters
        ----------
        tensors : list of Tensor or None
            Any tensors; ``None`` is passed over.
        flags : array of int32
            What to measure of each; -1 for nothing.
        rows : array of int64
            The addresses of their rows.
        memory : ListMemory
            What is known of the list from earlier calls.  If it has places for copies, the tensors are copied as well.
        """
        copies = None if memory.copies is None else memory.copies.ctypes.data
        done = memory.done
        known = memory.known.ctypes.data
        self._many(tensors, len(tensors), flags.ctypes.data, rows.ctypes.data, known, copies, done.ctypes.data)
        is_left = ((done & _MEASURED) == 0) & (flags >= 0)
        return np.flatnonzero(is_left)

    def add_differences(self, tensors: list[Any], flags: _Flags, rows: _Rows, memory: "ListMemory") -> NDArray[np.intp]:
        """Add the statistics of the differences of tensors and their copies, which `add_all` has made, to rows.

        Returns the positions of those that are not what they were when they were copied.
        """
        assert memory.copies is not None
        is_copied, done = memory.is_copied, memory.done
        arrays = (flags, rows, memory.known, memory.copies, done)
        self._differences(tensors, len(tensors), *(array.ctypes.data for array in arrays))
        return np.flatnonzero(is_copied & (done == 0))


class ListMemory:
    """Memory of a `TensorReader` for a list of tensors between two calls.

    Identity, type, memory, size, dtype, order and storage of each tensor are checked in each call.

    Parameters
    ----------
    count : int
        The number of tensors.
    sizes : sequence of int, optional
        The numbers of elements of tensors that are copied; 0 for those that are not.
    """

    def __init__(self, count: int, sizes: Sequence[int] | None = None) -> None:
        self.known: _Rows = np.zeros((count, 2), np.int64)
        self.done: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.copies: _Rows | None = None
        if sizes is not None:
            self.copies = np.zeros((count, 5), np.int64)
            self.copies[:, 1] = sizes

    @property
    def is_copied(self) -> NDArray[np.bool_]:
        """Whether each tensor was copied."""
        return (self.done & _COPIED) > 0

    def copy_to(self, addresses: _Rows) -> None:
        """Set where the tensors are copied to; 0 for those that are not copied."""
        assert self.copies is not None
        self.copies[:, 0] = addresses
