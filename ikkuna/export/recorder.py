"""Measures what the taps hand over, for whoever asked, into the rows of the open step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ikkuna.export.demand import Plan, Task
from ikkuna.export.faults import Faults
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.kinds import FORWARD_KINDS
from ikkuna.export.messages.message import Message, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.rows import Entry, Rows
from ikkuna.export.subscriber.subscription import Subscription
from ikkuna.numerics.device import measure_vectors
from ikkuna.numerics.measure import measure

__all__ = ["Place", "Recorder"]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What a tap looks at: a kind, and the module it belongs to (``None`` for the network).

    A place equals only itself, which makes it a cheap key; an `Observer` makes each one once.
    """

    kind: str
    module: str | None = None

    def message(self, stamp: Stamp, path: str) -> Message:
        """Return the message of one leaf or parameter at this place, without data."""
        if self.module is None:
            return NetworkMessage(stamp, self.kind, path=path)
        joint = ":" if self.kind in FORWARD_KINDS else "."
        name = f"{self.module}{joint}{path}" if path else self.module
        return ModuleMessage(stamp, self.kind, module=self.module, path=path, name=name)


class Recorder:
    """Takes tensors while a step is open.

    Parameters
    ----------
    faults : where errors go
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.plan = Plan(())
        self.rows: Rows | None = None
        self.unreadable = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._pivots: dict[tuple[object, ...], float] = {}

    def open(self, stamp: Stamp, plan: Plan) -> None:
        """Begin the rows of a step."""
        self.plan, self.rows = plan, Rows(stamp)

    def close(self) -> Rows | None:
        """Return the rows of the step, on their way to the host; there are none while no step is open."""
        rows, self.rows, self.plan = self.rows, None, Plan(())
        if rows is not None:
            rows.start_copy()
        return rows

    def wants(self, kind: str, module: str | None = None) -> bool:
        """Whether anything would be done with such a tensor now."""
        return self.rows is not None and self.plan.task(kind, module) is not None

    def receive(self, place: Place, tensor: Tensor, path: str, weight: int | Tensor = 1) -> None:
        """Measure a tensor; `weight` is how many elements of a mean each of its elements stands for."""
        if self.rows is None or (task := self.plan.task(place.kind, place.module)) is None:
            return
        key = (place, path)
        if (entry := self.rows.entries.get(key)) is None:
            entry = self.rows.entries[key] = Entry(key, place.message(self.rows.stamp, path), task)
            entry.pivot = self._pivots.get(key, 0.0)
            entry.is_mean = place.kind == "loss" and tensor.numel() == 1
        if task.fields:
            self._measure_fields(entry, tensor, task, weight)
        if task.measurers:
            if tensor.layout is not torch.strided:
                tensor = tensor.to_dense()  # authors of metrics need not know of sparse gradients
            message = entry.message.carrying(tensor)
            for subscription in task.measurers:
                self._measure_own(entry, subscription, message, tensor)

    def _measure_fields(self, entry: Entry, tensor: Tensor, task: Task, weight: int | Tensor) -> None:
        generator = self._generator(tensor) if "sampled_codes" in task.fields else None
        if tensor.is_cpu and isinstance(weight, int):
            if (record := measure(tensor, task.fields, generator)) is None:
                self.unreadable += 1
            elif weight:
                entry.add_record(record if weight == 1 else record.repeated(weight))
            return
        vectors = measure_vectors(tensor, task.fields, entry.pivot, weight, generator)
        if vectors is None:
            self.unreadable += 1
        else:
            entry.add_on_device(vectors)

    def _generator(self, tensor: Tensor) -> torch.Generator:
        """Return our own source of randomness on the device of `tensor`."""
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]

    def _measure_own(
        self, entry: Entry, subscription: Subscription, message: Message | MessageBundle, tensor: Tensor
    ) -> None:
        if subscription.disabled:  # since the step began
            return
        version = None if tensor.is_inference() else tensor._version
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            row = self.faults.call(subscription, "measure", subscription.subscriber.measure, message)
        if isinstance(row, Tensor):
            self.faults.call(subscription, "merge", partial(entry.add_measured, subscription), row)
        if version is not None and tensor._version != version:
            self.faults.blame(
                subscription, f"it changed {entry.message.kind!r} of {entry.message.series_name} in place"
            )

    def receive_together(self, tensors: Mapping[str, Tensor]) -> None:
        """Hand the tensors of one call of the loss module to those who measure them side by side."""
        if self.rows is None:
            return
        for subscription in self.plan.together:
            messages = {
                kind: NetworkMessage(self.rows.stamp, kind, tensors[kind])
                for kind in subscription.kinds
                if kind in tensors
            }
            if len(messages) < len(subscription.kinds):
                continue
            bundle = MessageBundle(messages)
            key = (subscription,)
            entry = self.rows.entries.setdefault(
                key, Entry(key, bundle.first, Task(frozenset(), (subscription,), (subscription,)))
            )
            self._measure_own(entry, subscription, bundle, tensors[subscription.kinds[0]])

    def remember(self, entry: Entry) -> None:
        """Keep the mean of an entry as the pivot of the next one, so that device rows lose no digits to a large offset."""
        if entry.record is not None and entry.record.center is not None:
            self._pivots[entry.key] = entry.record.center
