"""Work that waits for an accelerator, in a thread and on a stream of it, and copies to the host that wait for nothing."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.support.failures import raise_users_exception
from ikkuna.support.threads import Worker

T = TypeVar("T")

MOST_WORK = 4
"""Number of functions of one owner that may wait, or run, before no more are taken."""
MOST_BYTES = 1 << 30
"""Bytes on a device that functions which wait, or run, may refer to before no more are taken."""


class Pending(Generic[T]):
    """The result of a function that runs beside training.

    Parameters
    ----------
    work : callable
        Called once, by the thread or by :meth:`result`.

    Attributes
    ----------
    is_done : callable
        Returns what :meth:`arrived` returns, without a reference to the result.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claim = threading.Lock()
        self._done = threading.Event()
        self.is_done = self._done.is_set
        self._result: T
        self._error: Exception | None = None

    def run(self) -> None:
        """Call the function, unless that was done or is being done."""
        if not self._claim.acquire(blocking=False) or self._work is None:
            return
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        finally:
            self._work = None  # refers to tensors
            self._done.set()

    def arrived(self) -> bool:
        """Return whether the result is there."""
        return self._done.is_set()

    def result(self) -> T:
        """Return the result, or raise the exception of the function; wait if necessary."""
        self.run()  # if the thread has not begun
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def __call__(self) -> T:
        """Return the result as `result` does."""
        return self.result()


class DeviceThread:
    """Calls functions one after the other in a thread.

    What a function computes on a device, it computes on a stream of its own, after everything that the streams of the caller
    had to do when the function was added.  In a forked process the caller computes it.

    Parameters
    ----------
    devices : iterable of torch.device
        The devices that the functions use.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._modules = [(device, torch.get_device_module(device)) for device in devices]
        self._streams: list[Any] = []
        self._queue: deque[Pending[Any]] = deque()
        self._waiting: list[tuple[Callable[[], bool], int, int]] = []  # whether it is done, its owner and bytes
        self._worker = Worker("ikkuna device", lambda: self._run_first if self._queue else None)

    def is_full(self, owner: object) -> bool:
        """Return whether so many functions of `owner`, or so many bytes, wait that a further function would only wait longer."""
        with self._worker.lock:
            self._waiting = [entry for entry in self._waiting if not entry[0]()]
            count = sum(known == id(owner) for _, known, _ in self._waiting)
            return count >= MOST_WORK or sum(size for *_, size in self._waiting) >= MOST_BYTES

    def add(self, work: Callable[[], T], owner: object = None, size: int = 0) -> Pending[T]:
        """Call a function later, and return its result to come; it refers to `size` bytes of the devices."""
        events = [module.current_stream(device).record_event() for device, module in self._modules]
        pending = Pending(lambda: self._on_own_streams(work, events))
        if self._worker.process != os.getpid():
            pending.run()
            return pending
        with self._worker.lock:
            self._queue.append(pending)
            self._waiting.append((pending.is_done, id(owner), size))
        self._worker.wake()
        return pending

    def _run_first(self) -> None:
        self._queue.popleft().run()

    def _on_own_streams(self, work: Callable[[], T], events: list[Any]) -> T:
        if not self._streams:
            self._streams = [module.Stream(device) for device, module in self._modules]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for stream, event, (_, module) in zip(self._streams, events, self._modules, strict=True):
                stack.enter_context(module.stream(stream))
                stream.wait_event(event)
            result = work()
            for stream in self._streams:  # before the memory of its tensors is used again by other streams
                stream.synchronize()
        return result


_device_thread = cache(DeviceThread)


def _thread_of(devices: Iterable[torch.device]) -> DeviceThread | None:
    """Return the thread of some devices; ``None`` for the host, and for devices without streams, such as ``mps``."""
    found = tuple(sorted({device for device in devices if device.type != "cpu"}, key=str))
    if found and all(hasattr(torch.get_device_module(device), "Stream") for device in found):
        return _device_thread(found)
    return None


def is_full(devices: Iterable[torch.device], owner: object) -> bool:
    """Return whether work of `owner` on these devices is slower than it is added, so that more of it must not be added.

    So many functions wait or run, `MOST_WORK` of the owner, or refer to so many bytes, `MOST_BYTES` of all owners.

    Examples
    --------
    >>> is_full([torch.device("cpu")], None)
    False
    """
    thread = _thread_of(devices)
    return thread is not None and thread.is_full(owner)


def run_beside(
    devices: Iterable[torch.device], work: Callable[[], T], owner: object = None, size: int = 0
) -> Pending[T]:
    """Run a function that waits for devices beside training, in the order of the calls; on the host, run it at once.

    A device without streams, such as ``mps``, has to be waited for: it takes the function at once, too.

    Parameters
    ----------
    devices : iterable of torch.device
        The devices that the function uses.
    work : callable
        The function.
    owner : object
        On whose behalf it runs, see `is_full`.
    size : int
        The bytes on the devices that it keeps alive.

    Examples
    --------
    >>> pending = run_beside([torch.device("cpu")], lambda: 3)
    >>> pending.arrived(), pending.result()
    (True, 3)
    """
    if (thread := _thread_of(devices)) is not None:
        return thread.add(work, owner, size)
    pending = Pending(work)
    pending.run()
    return pending


class HostCopy:
    """One non-blocking copy of several tensors of one device to the host.

    Parameters
    ----------
    tensors : sequence of Tensors
        They may be changed once the constructor has returned.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        device = tensors[0].device
        module = _module_with_events(device)
        self._bounds, packed = _pack(tensors)
        self._event: Any = None
        if module is None:
            self._packed = packed.cpu()
            return
        self._packed = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._packed.copy_(packed, non_blocking=True)
        self._event = module.Event()
        self._event.record(module.current_stream(device))

    def arrived(self) -> bool:
        """Return whether the copy is complete, or has failed, so that `arrays` raises the error."""
        try:
            return self._event is None or bool(self._event.query())
        except RuntimeError as error:
            raise_users_exception(error)
            return True

    def arrays(self) -> list[NDArray[Any]]:
        """Return the tensors as arrays, floating-point numbers in float64; wait for the copy if necessary."""
        if self._event is not None:
            self._event.synchronize()
        groups = {dtype: self._packed[first:last].view(dtype) for dtype, (first, last) in self._bounds.items()}
        arrays, offsets = [], dict.fromkeys(groups, 0)
        for shape, dtype in self._shapes:
            offset, size = offsets[dtype], shape.numel()
            found = groups[dtype][offset : offset + size].reshape(shape)
            arrays.append((found.double() if dtype.is_floating_point else found).numpy())
            offsets[dtype] += size
        return arrays


def _pack(tensors: Sequence[Tensor]) -> tuple[dict[torch.dtype, tuple[int, int]], Tensor]:
    """Return the bytes of tensors in one tensor, those of each dtype together, and where these begin and end."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    bounds, parts, end = {}, [], 0
    for dtype in sorted(by_dtype, key=lambda dtype: -dtype.itemsize):  # so that each begins at a multiple of its size
        group = by_dtype[dtype]
        parts.append((torch.cat(group) if len(group) > 1 else group[0].contiguous()).view(torch.uint8))
        bounds[dtype] = end, (end := end + parts[-1].numel())
    return bounds, torch.cat(parts) if len(parts) > 1 else parts[0].clone()


def _module_with_events(device: torch.device) -> Any:
    """Return the module of a device that can copy without waiting; ``None`` if it cannot."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Event") and hasattr(module, "current_stream") else None
