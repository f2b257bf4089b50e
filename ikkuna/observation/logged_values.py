"""Values that the user logs by name."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.backends.backend import Backend
from ikkuna.distributed.dtensor import is_distributed
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Delivery, Item
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.elements import has_numbers
from ikkuna.numerics.statistics import Record
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.store.names import Series
from ikkuna.store.quantity import LOGGED
from ikkuna.store.values import Image, Matrix, is_histogram, is_pixels
from ikkuna.support.device_thread import HostCopy
from ikkuna.support.failures import log, raise_users_exception

_MOST = 100_000
_TYPES = "a number, a tensor or array of numbers, a histogram, a matrix, a picture or a text"


class LoggedValues:
    """Keeps values until their step ends, and posts those of each step together, with one copy from each device.

    Parameters
    ----------
    bus : MessageBus
        Receives them.

    Attributes
    ----------
    dropped : int
        Number of values that were dropped, because their step is over or because too many wait.
    is_used : bool
        Whether a value was kept; before, the ends of steps need not be reported.
    label : str
        What backends that fail with these values log.
    """

    label = "log()"

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self._lock = threading.RLock()  # reentrant, because a signal handler may log
        self._waiting: dict[tuple[int, str], tuple[Stamp, dict[str, Any]]] = {}  # by step and pass
        self._posted: list[_LoggedStep] = []
        self._newest = self._newest_before = -1  # the last step that has ended, and the last one of an earlier training
        self._stored: set[tuple[str, str]] = set()  # passes and names of the values of the newest step that are posted
        self.dropped = 0
        self.is_used = False

    def add(self, name: str, value: Any, stamp: Stamp, ended: int, step: int | None = None) -> None:
        """Keep a value until its step ends; a second one of the same name and step replaces it.

        If the step has ended with a value of the name, a second one belongs to the next step, so that no step has two.

        Parameters
        ----------
        name : str
            Any name.
        value : Any
            The value.
        stamp : Stamp
            The open step, or the last one.
        ended : int
            The last step that has ended, which is read with the first value.
        step : int, optional
            The step to which the value belongs instead.

        Raises
        ------
        ConfigError, ConfigTypeError
            If the name or the value is invalid.
        """
        if not isinstance(name, str):
            raise ConfigTypeError(f"log() needs a name, got {type(name).__name__} {name!r}")
        if not name.strip():
            raise ConfigError("log() needs a name, got an empty one")
        kept = _kept(name, value)
        with self._lock:
            if not self.is_used:
                self.is_used, self._newest = True, max(self._newest, ended)
            number = stamp.global_step if step is None else step
            is_stored = number == self._newest and (
                number == self._newest_before or (stamp.pass_name, name) in self._stored
            )
            if is_stored and step is None:
                number, is_stored = number + 1, False
            why = ""
            if number < self._newest:
                why = f"step {self._newest} has ended"
            elif is_stored:
                why = "the step has one that is stored"
            elif sum(len(named) for _, named in self._waiting.values()) >= _MOST:
                why = f"{_MOST} values wait for their steps"
            if why:
                self.dropped += 1
                if self.dropped == 1:
                    log.warning("log(%r): a value of step %d is dropped: %s", name, number, why)
                return
            _, named = self._waiting.get((number, stamp.pass_name), (stamp, {}))
            named[name] = kept
            self._waiting[number, stamp.pass_name] = replace(stamp, global_step=number), named

    @property
    def first_step(self) -> float:
        """The first step of which values wait or are on their way to the run; infinite if there is none."""
        with self._lock:
            steps = [step for step, _ in self._waiting]
            steps += [posted.stamp.global_step for posted in self._posted if not posted.is_over]
        return min(steps, default=math.inf)

    @property
    def is_waiting(self) -> bool:
        """Whether values wait for the end of their step."""
        return bool(self._waiting)

    def step_ends(self, step: int | None = None, is_epoch: bool = False) -> None:
        """Post the values of all steps up to this one, or all; those of the step itself are committed with it, or the epoch."""
        with self._lock:
            if step is not None and step != self._newest:
                self._newest = step
                self._stored.clear()
            if not self._waiting:
                return
            due = sorted((key for key in self._waiting if step is None or key[0] <= step), key=lambda key: key[0])
            values = [self._waiting.pop(key) for key in due]
            posted = [_LoggedStep(stamp, named, self, is_epoch or stamp.global_step != step) for stamp, named in values]
            for stamp, named in values:
                if stamp.global_step == self._newest:
                    self._stored.update((stamp.pass_name, name) for name in named)
            self._posted = [earlier for earlier in self._posted if not earlier.is_over] + posted
        for logged in posted:
            self._bus.queue.append(logged)

    def rewind(self, step: int) -> None:
        """Accept values from `step` on; the steps before are those of an earlier training, and end with their values."""
        self._newest = self._newest_before = step - 1


class _LoggedStep(Item):
    """The values of one step, on their way to the host."""

    def __init__(self, stamp: Stamp, values: dict[str, Any], sender: LoggedValues, commits: bool) -> None:
        self.stamp = stamp
        self.is_over = False
        self._commits = commits
        self._values = values
        self._sender = sender
        by_device: dict[torch.device, list[str]] = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                by_device.setdefault(value.device, []).append(name)
        self._copies = [(names, HostCopy([values[name] for name in names])) for names in by_device.values()]

    def arrived(self) -> bool:
        """Return whether all values have reached the host."""
        return all(copy.arrived() for _, copy in self._copies)

    def deliver(self, bus: Delivery) -> None:
        """Show every value, and publish those that are numbers."""
        for names, copy in self._copies:
            for name, array in zip(names, copy.arrays(), strict=True):
                self._values[name] = array
        backends = _backends(bus)
        for name, value in self._values.items():
            try:
                self._deliver(bus, name, _shown(value), backends)
            except Exception as error:
                bus.error_guard.report_internal(f"log({name!r})", error)
        if self._commits:
            bus.commit(self.stamp.global_step)
        self.is_over = True

    def _deliver(self, bus: Delivery, name: str, value: Any, backends: tuple[str | Backend, ...]) -> None:
        if value is None:
            return
        series = Series(LOGGED, name, self.stamp.pass_name)
        if (run := bus.open_run()) is not None:
            run.show(series, value, self.stamp.global_step, backends, self._sender)
        if isinstance(value, float):
            bus.publish(NetworkMessage(self.stamp, LOGGED, value, Record.of(value), name))

    def abandon(self, bus: Delivery) -> None:
        """Forget the values."""
        self.is_over = True


def _backends(bus: Delivery) -> tuple[str | Backend, ...]:
    """Return the backends of all subscribers, or TensorBoard if there are none."""
    found = [backend for registered in bus.registered for backend in registered.subscriber.backends]
    return tuple(dict.fromkeys(found)) or ("tb",)


def _kept(name: str, value: Any) -> Any:
    """Return a value that does not change any more: a tensor stays on its device."""
    if isinstance(value, Tensor):
        if is_distributed(value):
            raise ConfigTypeError(f"log({name!r}) got a distributed tensor; log value.full_tensor() on all ranks")
        if not has_numbers(value) or value.is_complex() or value.is_quantized or value.layout is not torch.strided:
            raise ConfigTypeError(
                f"log({name!r}) needs a dense tensor of real numbers, got {value.dtype} {value.layout}"
            )
        return value.detach().clone()
    for kind, convert in _CONVERTERS:
        if kind(value):
            return convert(value)
    try:
        return float(value)  # also types of other libraries, such as Fraction and numpy's numbers
    except Exception as error:
        raise_users_exception(error)
        raise ConfigTypeError(f"log({name!r}) needs {_TYPES}, got {type(value).__name__}") from error


def _array(value: Any) -> Any:
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        raise ConfigTypeError(f"log() needs an array of real numbers, got {array.dtype}")
    return array


def _is_picture(value: Any) -> bool:
    return hasattr(value, "savefig") or (hasattr(value, "save") and hasattr(value, "getbands"))


def _same(value: Any) -> Any:
    return value


_CONVERTERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (lambda value: isinstance(value, str | Matrix | Image) or is_histogram(value), _same),
    (lambda value: isinstance(value, Histogram), _same),
    (lambda value: isinstance(value, np.ndarray), _array),
    (_is_picture, Image.of),
)


def _shown(value: Any) -> Any:
    """Return what backends show: a number, a picture, or the histogram of several numbers; ``None`` for no number."""
    if isinstance(value, Histogram):
        return value if value.n else None
    if not isinstance(value, np.ndarray):
        return value
    if is_pixels(value.shape, str(value.dtype)):
        return Image.of(value)
    if value.size == 1:
        return float(value.reshape(()))
    return _shown(Histogram.of(torch.from_numpy(np.ascontiguousarray(value, dtype=np.float64)))) if value.size else None
