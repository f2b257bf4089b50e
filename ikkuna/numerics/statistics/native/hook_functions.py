"""Native functions that hooks call first, and the permits that tell these functions what they may measure."""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.numerics.statistics.native.tensor_reader import HOOK_KEY
from ikkuna.numerics.statistics.table import COLUMNS

__all__ = ["NOTHING", "PYTHON", "Function", "HookFunctions", "Permits"]

Function = Callable[[Any], int]
"""A native function of a tensor that returns whether it has recorded it."""

NOTHING, PYTHON = -1, -2
"""Entries of the table of what is measured of a row: nothing, and something that is measured in Python."""

_THREAD, _TABLE, _WANTED, _ROWS, _TASK, _FORWARD, _NANOSECONDS = _CELLS = range(7)


class Permits:
    """Memory in which Python writes what native functions may measure: one permit for outputs, and one for gradients.

    A permit is valid for one thread and one forward, and that for gradients for one backward.  Both end with :meth:`close`.

    Attributes
    ----------
    outputs, gradients : int
        The addresses at which native functions find the permits.
    """

    def __init__(self) -> None:
        self._array: NDArray[np.int64] = np.zeros((2, len(_CELLS)), np.int64)
        # the elements of a memoryview are assigned in a third of the time
        self._outputs, self._gradients = self._array[0].data, self._array[1].data
        self._kept: list[tuple[object, object]] = [(None, None), (None, None)]
        self.outputs, self.gradients = (int(permit.ctypes.data) for permit in self._array)

    def open(
        self,
        thread: int,
        table: NDArray[np.int64],
        wanted: NDArray[np.int32],
        forward: int,
        task: int | None = None,
    ) -> None:
        """Permit the measurement of outputs, or of gradients.

        Parameters
        ----------
        thread : int
            The identifier of the thread.
        table : array of int64
            One number, the address of the table's first row.
        wanted : array of int32
            By row, what to measure, `NOTHING` or `PYTHON`.
        forward : int
            The number of the forward.
        task : int, optional
            The number of the backward; ``None`` for outputs.
        """
        cells = self._outputs if task is None else self._gradients
        kept = self._kept[task is not None]
        if kept[0] is not table or kept[1] is not wanted:
            cells[_THREAD] = 0
            self._kept[task is not None] = table, wanted
            cells[_TABLE], cells[_WANTED], cells[_ROWS] = table.ctypes.data, wanted.ctypes.data, len(wanted)
        cells[_TASK], cells[_FORWARD] = task or 0, forward
        cells[_THREAD] = thread

    def close(self) -> None:
        """End both permits."""
        self._outputs[_THREAD] = self._gradients[_THREAD] = 0

    def seconds(self) -> float:
        """Return the time that native functions have taken."""
        return float(self._outputs[_NANOSECONDS] + self._gradients[_NANOSECONDS]) * 1e-9


class HookFunctions:
    """Creates the functions of ``hooks.cpp``.

    Each function takes a tensor and returns whether it has recorded it; it raises nothing.

    Parameters
    ----------
    library : CDLL
        The loaded library, whose objects a `TensorReader` has set up.

    Raises
    ------
    RuntimeError
        If the library or the interpreter lacks a function, or if the functions do not work with this version of torch.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        with_lock: Any = ctypes.PyDLL(library._name, handle=library._handle)
        try:
            has_all = with_lock.has_hook_functions
            self._output, self._gradient = with_lock.output_function, with_lock.gradient_function
        except AttributeError as error:
            raise RuntimeError(f"the native library has no such function: {error}") from error
        for make in (self._output, self._gradient):
            make.argtypes, make.restype = (ctypes.py_object,), ctypes.py_object
        has_all.argtypes, has_all.restype = (ctypes.py_object,), ctypes.c_int
        if not has_all([OrderedDict()]):
            raise RuntimeError("the interpreter does not export the functions that hooks need")
        self._check()

    def output(
        self,
        permits: Permits,
        row: int,
        gradient_row: int,
        forward_hooks: Mapping[int, Any] | None,
        dictionaries: list[Any],
    ) -> Function:
        """Return a function that measures an output of a module, and registers the hook of its gradient.

        Parameters
        ----------
        permits : Permits
            What may be measured.
        row, gradient_row : int
            The rows of the output and of its gradient; negative for nothing.
        forward_hooks : dict, optional
            The forward hooks of the module, if an output that is a view can only be a view of a tensor that nothing else has,
            unless a second hook has replaced it.
        dictionaries : list
            By the number of the forward, an ``OrderedDict`` with the hook of the gradient under `HOOK_KEY`, that nothing else has;
            ``None`` for those that Python has to create.
        """
        function: Function = self._output((permits.outputs, row, gradient_row, forward_hooks, dictionaries, permits))
        return function

    def gradient(self, permits: Permits, row: int, forward: int) -> Function:
        """Return a function that measures the gradient of an output of a forward."""
        function: Function = self._gradient((permits.gradients, row, forward, permits))
        return function

    def _check(self) -> None:
        """Raise `RuntimeError` if a small example gives a wrong result."""
        permits, rows, seen = Permits(), np.zeros((2, len(COLUMNS))), []
        table, wanted = np.array([rows.ctypes.data]), np.zeros(2, np.int32)
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(3, device="cpu", requires_grad=True) * 2
            hooks = OrderedDict({HOOK_KEY: lambda grad: seen.append(grad.sum().item())})
            record = self.output(permits, 0, 1, None, [hooks])
            is_closed = not record(x)
            permits.open(get_ident(), table, wanted, 0)
            is_done = record(x) and not record(torch.ones(6, device="cpu")[::2])
            permits.close()
            x.sum().backward()
        if not (is_closed and is_done and rows[0, 0] == 3 and seen == [3.0]):
            raise RuntimeError("the hooks of the native library do not work with this version of torch")
