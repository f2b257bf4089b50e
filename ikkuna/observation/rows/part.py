"""The measurements of one part of an open step, and their copies on the host."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.distributed.dtensor import ShardPosition
from ikkuna.metrics.bus.error_guard import ErrorGuard
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.metrics.subscriber.state import DeferredRow
from ikkuna.numerics.elements import widest_float
from ikkuna.numerics.statistics.device import DeviceStatistics, ImpreciseRows
from ikkuna.numerics.statistics.host import HostStatistics
from ikkuna.support.device_thread import is_full
from ikkuna.support.failures import raise_users_exception


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


_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "last": lambda known, value: value,
    "ranks": lambda known, value: value,
}


class Part:
    """The measurements of one part of an open step, such as those of one forward.

    Parameters
    ----------
    error_guard : ErrorGuard
        Handles errors in the merge of subscribers' results.
    native : bool
        Whether to use the C++ kernels if they are available.
    imprecise : ImpreciseRows
        Which rows sums in float32 are not enough for on a device.

    Attributes
    ----------
    host : HostStatistics
        The shared statistics of tensors on the host.
    devices : dict
        Those of tensors on other devices.
    measured : dict
        The results of subscribers' own ``measure``, by row and subscriber.
    together : dict
        The results of subscribers that measure several tensors together.
    shards : dict
        By row, which shard of a distributed tensor this rank has.
    reductions : dict
        By row, how the calls of a loss become one number: ``"mean"`` or ``"sum"``.
    is_clear : bool
        Whether nothing was added since it was emptied.
    """

    def __init__(self, error_guard: ErrorGuard, native: bool, imprecise: ImpreciseRows) -> None:
        self._error_guard, self._imprecise = error_guard, imprecise
        self.host = HostStatistics(native)
        self.devices: dict[torch.device, DeviceStatistics] = {}
        self.measured: dict[int, dict[Registered, Tensor | DeferredRow]] = {}
        self.together: dict[Registered, Tensor | DeferredRow] = {}
        self.shards: dict[int, ShardPosition] = {}
        self.reductions: dict[int, str] = {}
        self.is_clear = True

    def statistics(self, x: Tensor) -> HostStatistics | DeviceStatistics:
        """Return the statistics to which a tensor is added."""
        return self.host if x.is_cpu else self.on_device(x.device)

    def on_device(self, device: torch.device) -> DeviceStatistics:
        """Return the statistics of the tensors of a device."""
        if (found := self.devices.get(device)) is None:
            found = self.devices[device] = DeviceStatistics(device, self._imprecise)
        return found

    def add_measured(
        self,
        row: int | None,
        registered: Registered,
        value: Tensor | DeferredRow,
        device: torch.device | None = None,
    ) -> None:
        """Add the result of a subscriber's ``measure`` to its row; ``None`` if it measures several tensors together.

        A new result must lie on the host or on `device`, so that it can be copied together with those of other subscribers.
        A new `DeferredRow` is dropped and counted while too many wait, before its tensor is copied.
        """
        if registered.disabled:  # since the step began
            return
        if device is not None and isinstance(value, DeferredRow) and is_full((value.tensor.device,), self._error_guard):
            registered.drop_late()
            return
        results = self.together if row is None else self.measured.setdefault(row, {})
        known = results.get(registered)
        if known is None and device is None:  # it was checked when it was new
            results[registered] = value
            return
        stage = "keep" if known is None else "merge"  # a first result does not reset the count of failed merges

        def merged(value: Tensor | DeferredRow) -> Tensor | DeferredRow:
            value = copied_row(value, device) if device is not None else value
            if isinstance(value, DeferredRow) and registered.subscriber.merge != "last":
                raise TypeError(
                    f"measure may return a DeferredRow if merge is 'last', got {registered.subscriber.merge!r}"
                )
            return value if known is None else _MERGE[registered.subscriber.merge](known, value)

        if (result := self._error_guard.call_each(registered, stage, merged, (value,))) is not None:
            results[registered] = result

    def merge(self, other: "Part") -> None:
        """Add the measurements of another part, and empty that."""
        self.host.merge(other.host)
        for device, statistics in other.devices.items():
            self.on_device(device).merge(statistics)
        for row, results in ((None, other.together), *other.measured.items()):
            for registered, value in results.items():
                self.add_measured(row, registered, value)
        self.shards |= other.shards
        self.reductions |= other.reductions
        other.clear()

    def is_taken(self) -> None:
        """Handle that everything was taken, and the statistics were emptied."""
        self.measured, self.together, self.shards, self.reductions = {}, {}, {}, {}
        self.is_clear = True

    def clear(self, rows: Iterable[int] | None = None) -> None:
        """Empty some rows, or all."""
        rows = None if rows is None else list(rows)
        self.host.clear(rows)
        for statistics in self.devices.values():
            statistics.clear(rows)
        if rows is None:
            self.is_taken()
        for row in rows or ():
            for by_row in (self.measured, self.shards, self.reductions):
                by_row.pop(row, None)


def copied_row(value: Tensor | DeferredRow, device: torch.device) -> Tensor | DeferredRow:
    """Return a copy in float64, or in float32 on a device without that; raise `TypeError` if it cannot be copied to the host."""
    if isinstance(value, DeferredRow):
        if not value.tensor.is_cpu:
            return value.copied()
        value = value.row()
    value = value.detach()
    if value.is_complex():
        raise TypeError(f"measure must return real numbers, got {value.dtype}")
    copy = value.to(widest_float(value), copy=True)
    if copy.is_cpu:
        copy.numpy()  # raises for sparse tensors, and for subclasses without data
    elif type(copy) is not Tensor or copy.device != device:
        raise TypeError(
            f"measure must return a Tensor on the host or on {device}, got {type(copy).__name__} on {copy.device}"
        )
    return copy


class PartPool:
    """The parts of a recorder that are not in use.

    Parameters
    ----------
    error_guard, native
        See `Part`.

    Attributes
    ----------
    error_guard : ErrorGuard
        Handles errors.
    """

    def __init__(self, error_guard: ErrorGuard, native: bool) -> None:
        self.error_guard, self._native = error_guard, native
        self._imprecise = ImpreciseRows()
        self._free: list[Part] = []

    def take(self) -> Part:
        """Return an empty part."""
        return self._free.pop() if self._free else Part(self.error_guard, self._native, self._imprecise)

    def release(self, parts: Iterable[Part]) -> None:
        """Empty parts, and keep them for later, so that a step which takes as many gets the same ones in the same order."""
        for part in reversed([*parts]):
            if not part.is_clear:
                part.clear()
            self._free.append(part)
