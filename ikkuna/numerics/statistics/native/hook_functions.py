"""The native functions that hooks call first: a library of its own, compiled with the headers of torch."""

import ctypes
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.statistics.native.kernels import Library
from ikkuna.numerics.statistics.table import COLUMN, EMPTY, empty_rows
from ikkuna.support.failures import log
from ikkuna.support.files import available_bytes
from ikkuna.support.native import Compiler, build_library, joined_source, stored_library
from ikkuna.support.threads import BackgroundThread, computed_once
from ikkuna.support.torch_internals import GLOBAL_FORWARD_HOOKS

Function = Callable[[Any, Any], bool]
"""A native function of the arguments and the output of a module that returns whether it has recorded them."""

_THREAD, _TABLE, _WANTED, _ROWS, _TASK, _FORWARD, _NANOSECONDS, _HAS_INPUTS = _CELLS = range(8)


OUTPUTS, GRADIENTS, MICRO_GRADIENTS = range(3)
"""What a permit is for: what modules receive and return, gradients of that, and gradients of parameters of one micro-batch."""


NO_THREADS = np.zeros(3, np.int64).data


class Permits:
    """Memory in which Python writes what native functions may measure, one permit for each purpose.

    A permit is valid for one thread and one forward, and that for gradients for one backward.  All end with :meth:`close`.

    Attributes
    ----------
    addresses : list of int
        The addresses at which native functions find the permits.
    threads : memoryview
        Of each permit the cell of the thread; all permits end when `NO_THREADS` is written to it, as :meth:`close` does.
    """

    def __init__(self) -> None:
        self._array: NDArray[np.int64] = np.zeros((3, len(_CELLS)), np.int64)
        # the elements of a memoryview are assigned in a third of the time
        self._cells = [permit.data for permit in self._array]
        self.threads = self._array[:, _THREAD].data
        self._kept: list[tuple[object, object]] = [(None, None)] * 3
        self.addresses = [int(permit.ctypes.data) for permit in self._array]

    def open(
        self,
        which: int,
        thread: int,
        table: NDArray[np.int64],
        wanted: NDArray[np.int32],
        forward: int,
        task: int = -1,
        has_inputs: bool = False,
    ) -> None:
        """Open a permit.

        Parameters
        ----------
        which : int
            What it is for.
        thread : int
            The identifier of the thread.
        table : array of int64
            One number, the address of the table's first row.
        wanted : array of int32
            By row, what to measure, `NOTHING` or `PYTHON`.
        forward : int
            The number of the forward; -1 for gradients of parameters.
        task : int
            The number of the backward, for gradients.
        has_inputs : bool
            Whether what modules receive is measured as well.
        """
        cells, kept = self._cells[which], self._kept[which]
        if kept[0] is not table or kept[1] is not wanted:
            cells[_THREAD] = 0
            self._kept[which] = table, wanted
            cells[_TABLE], cells[_WANTED], cells[_ROWS] = table.ctypes.data, wanted.ctypes.data, len(wanted)
        cells[_TASK], cells[_FORWARD], cells[_HAS_INPUTS] = task, forward, has_inputs
        cells[_THREAD] = thread

    def close(self) -> None:
        """End all permits."""
        self.threads[:] = NO_THREADS

    def seconds(self) -> float:
        """Return the time that native functions have taken."""
        first, second, third = self._cells
        return float(first[_NANOSECONDS] + second[_NANOSECONDS] + third[_NANOSECONDS]) * 1e-9


MOST_LOSSES = 40
"""How many losses `CountedSteps` has memory for; then they are delivered, and the threshold is computed again."""


class CountedSteps(ctypes.Structure):
    """Memory in which native functions and `IdleSteps` write what they know of steps of which only the loss is wanted.

    Attributes
    ----------
    thread : int
        The thread whose events native functions handle; 0 for none.
    seen : int
        The events of the open step so far.
    takes_losses, is_observed : int
        Whether losses are wanted, and the arguments of the model and the loss.
    size, most : int
        The number of the optimizer's parameters, and that of losses after which the counting ends.
    nodes, behind : int
        The numbers of the first node of the open forward, and of the first behind it.
    nanoseconds : int
        The time that was spent on events.
    loss, threshold : float
        The loss of the open step, and the largest one that is usual.
    nodes_at_end, nanoseconds_at_end : int
        The number of the next node, and the time spent, at the end of the last step.
    count, gradients_at : int
        The number of losses, and the number among them of the next step whose gradients are read, in Python.
    losses, ends : array
        The loss of each step, and the time of its end in seconds of the clock.
    """

    thread: int
    seen: int
    takes_losses: bool
    is_observed: bool
    size: int
    most: int
    nodes: int
    behind: int
    nanoseconds: int
    loss: float
    threshold: float
    nodes_at_end: int
    nanoseconds_at_end: int
    count: int
    gradients_at: int
    losses: "ctypes.Array[ctypes.c_double]"
    ends: "ctypes.Array[ctypes.c_double]"

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("thread", "seen", "takes_losses", "is_observed", "size", "most")),
        *((name, ctypes.c_int64) for name in ("nodes", "behind", "nanoseconds")),
        *((name, ctypes.c_double) for name in ("loss", "threshold")),
        *((name, ctypes.c_int64) for name in ("nodes_at_end", "nanoseconds_at_end", "count", "gradients_at")),
        *((name, ctypes.c_double * MOST_LOSSES) for name in ("losses", "ends")),
    )


class HookFunctions:
    """The functions of ``hooks.cpp``.

    Parameters
    ----------
    library : CDLL
        The loaded library.
    kernels : Library
        The kernels that it calls.

    Raises
    ------
    RuntimeError
        If the library lacks a function, or if its results are wrong.

    Attributes
    ----------
    call_natively : callable
        Lets objects of a class be called without Python: its hooks where their attribute `count` handles the event, or, if the second
        argument is true, each of their attribute `hooks`.
    """

    def __init__(self, library: ctypes.CDLL, kernels: Library) -> None:
        with_lock: Any = ctypes.PyDLL(library._name, handle=library._handle)  # does not release the lock of Python
        try:
            set_up, self._watch, self._watch_all = (
                *(with_lock.set_up, with_lock.watch_gradient, with_lock.watch_parameters),
            )
            self._output, self._gradient = with_lock.output_function, with_lock.gradient_of
            self._handler, self.call_natively = with_lock.event_handler, with_lock.call_natively
        except AttributeError as error:
            raise RuntimeError(f"the native library has no such function: {error}") from error
        number, held = ctypes.c_int64, ctypes.py_object
        self._kernels = kernels
        self._functions, self._empty = (ctypes.c_void_p * 4)(*kernels.addresses), EMPTY.copy()
        set_up.argtypes, set_up.restype = (ctypes.c_void_p, ctypes.c_void_p, held), None
        self._output.argtypes, self._output.restype = (number, ctypes.c_void_p, *[held] * 3), held
        self._gradient.argtypes, self._gradient.restype = (*[number] * 3, held), held
        self._watch.argtypes, self._watch.restype = (held, held), ctypes.c_int
        self._watch_all.argtypes, self._watch_all.restype = (held, held), held
        self._handler.argtypes, self._handler.restype = (number, number, held, held), held
        self.call_natively.argtypes, self.call_natively.restype = (held, ctypes.c_int), None
        set_up(ctypes.addressof(self._functions), self._empty.ctypes.data, GLOBAL_FORWARD_HOOKS)
        self._check()

    def output(
        self,
        permits: Permits,
        rows: Sequence[int],
        forward_hooks: Mapping[int, Any] | None,
        gradients: list[Any],
    ) -> Function:
        """Return a function that measures the input and the output of a module, and registers the hook of the output's gradient.

        Parameters
        ----------
        permits : Permits
            What may be measured.
        rows : sequence of int
            The rows of the input, of the output and of its gradient; negative for nothing.
        forward_hooks : dict, optional
            The forward hooks of the module, if an output that is a view can only be a view of a tensor that nothing else has,
            unless a second hook has replaced it.
        gradients : list
            By the number of the forward, what `gradient` returns; ``None`` for those that Python has to create.
        """
        kept = permits, forward_hooks, gradients
        numbers = np.array(rows, np.int64)
        function: Function = self._output(
            permits.addresses[OUTPUTS], numbers.ctypes.data, forward_hooks, gradients, kept
        )
        return function

    def gradient(
        self, permits: Permits, row: int, forward: int, hook: Callable[[Any], object], which: int = GRADIENTS
    ) -> object:
        """Return an object for a hook of the gradient of an output of a forward, which calls `hook` for what it does not measure.

        With `MICRO_GRADIENTS` it is for the gradient of a parameter, and `forward` is -1.
        """
        made: object = self._gradient(permits.addresses[which], row, forward, (hook, permits))
        return made

    def handlers(self, steps: CountedSteps, idle: object) -> list[object]:
        """Return what handles the usual events of steps that an object of `IdleSteps` counts, in their order."""
        return [self._handler(ctypes.addressof(steps), event, idle, steps) for event in range(6)]

    def watch(self, x: Tensor, gradient: object) -> bool:
        """Register what `gradient` has returned on a tensor that is no view; return whether that was possible."""
        return bool(self._watch(x, gradient))

    def watch_parameters(self, parameters: list[Tensor], gradients: list[object]) -> object:
        """Register what `gradient` has returned for each parameter; return what keeps the nodes with these hooks."""
        made: object = self._watch_all(parameters, gradients)
        return made

    def _check(self) -> None:
        """Raise `RuntimeError` if a small example gives a wrong result."""
        permits, rows, seen = Permits(), empty_rows(3), []
        table, wanted = np.array([rows.ctypes.data]), np.zeros(3, np.int32)
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.ones(3, device="cpu", requires_grad=True) * 2
            gradient = self.gradient(permits, 2, 0, lambda grad: seen.append(grad.sum().item()))
            record = self.output(permits, (0, 1, 2), None, [gradient])
            is_closed = not record((), x)
            permits.open(OUTPUTS, get_ident(), table, wanted, 0, has_inputs=True)
            is_done = record((), x) and record((x,), torch.ones(5, device="cpu"))
            is_done = is_done and not record((), torch.ones(6, device="cpu")[::2])
            permits.close()
            x.sum().backward()
        if not (is_closed and is_done and rows[:2, COLUMN["sumsq"]].tolist() == [12, 17] and seen == [3.0]):
            raise RuntimeError("the hooks of the native library do not work with this version of torch")


_SECONDS = 600.0
_NEEDED_BYTES = 4 << 30  # the compiler takes 1 GiB


def _compiler() -> Compiler:
    """Return the compiler, with the headers and libraries of the running torch and Python."""
    home = Path(torch.__file__).parent
    headers = [home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    if not (headers[0] / "torch/csrc/autograd/python_variable.h").exists() or not (headers[2] / "Python.h").exists():
        raise RuntimeError("the headers of torch or of Python are not installed")
    versions = torch.__version__, sys.version  # they become a part of the name of the library
    return Compiler(
        _SECONDS,
        *("-std=c++17", "-O2", "-shared", "-fPIC", *(f"-I{path}" for path in headers)),
        *(f"-DVERSION_{i}={text!r}" for i, text in enumerate(versions)),
        *("-Wl,--no-as-needed", f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
    )


class _Build:
    """The functions, once their library is loaded.

    Parameters
    ----------
    kernels : Library
        The kernels that it calls.
    """

    def __init__(self, kernels: Library) -> None:
        self.made: HookFunctions | None = None
        self._make = partial(HookFunctions, kernels=kernels)
        self._source = joined_source(Path(__file__).with_name("hooks.cpp"))
        self._thread = BackgroundThread(self._compile, "ikkuna-compiler")
        try:
            self.made = stored_library(self._source, self._make, _compiler())
            self._is_stored = self.made is not None
        except (OSError, RuntimeError) as error:
            self._report(error)
            self._is_stored = True
        if not self._is_stored:
            self._thread.start()

    def wait(self) -> None:
        """Wait until the library is compiled, or cannot be."""
        if not self._is_stored and self._thread.has_begun(None):
            self._thread.join()

    def _compile(self) -> None:
        try:
            if available_bytes() < _NEEDED_BYTES:
                raise RuntimeError("too little memory is free to compile them now")
            self.made = build_library(self._source, self._make, _compiler())
        except (OSError, RuntimeError) as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        log.info("hooks run in Python, which costs more: %s", str(error).strip().partition("\n")[0])


@computed_once  # two copies of the library would call each other for ever, see `call_natively` in its source
def _build(kernels: Library) -> _Build:
    return _Build(kernels)


def hook_functions(kernels: Library | None, wait: bool = False) -> HookFunctions | None:
    """Return the functions; ``None`` until they are compiled.

    They need the kernels, a compiler, and the headers of torch and Python.
    The first call on a machine begins to compile them in the background, which takes ten seconds or more.

    Parameters
    ----------
    kernels : Library or None
        The kernels that they call.
    wait : bool
        Whether to wait until they are compiled.
    """
    if kernels is None:
        return None
    build = _build(kernels)
    if wait:
        build.wait()
    return build.made
