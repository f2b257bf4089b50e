"""Measures what the taps hand over, for whoever asked, into the rows of the open step."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from ikkuna.distributed.dtensor import is_spread, local_part, whole
from ikkuna.export.bus.error_guard import ErrorGuard
from ikkuna.export.hooks.nested_tensors import detached
from ikkuna.export.messages.bundle import MessageBundle
from ikkuna.export.messages.message import Message, NetworkMessage
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.rows.plan import NOTHING, Plan, Task
from ikkuna.export.rows.rows import Entry, Rows
from ikkuna.export.rows.site import Site
from ikkuna.export.subscriber.registered import Registered
from ikkuna.numerics.elements import has_numbers
from ikkuna.numerics.statistics import native
from ikkuna.numerics.statistics.device import measure_vectors
from ikkuna.numerics.statistics.host import measure

__all__ = ["Recorder"]

log = logging.getLogger("ikkuna")


class Recorder:
    """Takes tensors while a step is open.

    Parameters
    ----------
    error_guard : ErrorGuard
        Handles errors.
    compiled : whether compiled kernels measure, where they are to be had

    Attributes
    ----------
    unreadable : number of tensors that have no numbers to read
    is_agreed : whether other ranks do the same, so that they can be asked for what they have of a tensor
    """

    def __init__(self, error_guard: ErrorGuard, compiled: bool = True) -> None:
        self.error_guard = error_guard
        self.kernels = native.library() if compiled else None  # made now rather than within a step
        self.plan = NOTHING
        self.rows: Rows | None = None
        self.unreadable = 0
        self.is_agreed = False
        self._generators: dict[torch.device, torch.Generator] = {}
        self._spare: dict[tuple[object, ...], Entry] = {}
        self._told: set[Registered] = set()

    def open(self, stamp: Stamp, plan: Plan) -> None:
        """Begin the rows of a step."""
        self.plan, self.rows = plan, Rows(stamp, self._spare)

    def close(self) -> Rows | None:
        """Return the rows of the step, on their way to the host; there are none while no step is open."""
        rows, self.rows, self.plan = self.rows, None, NOTHING
        if rows is not None:
            rows.start_copy()
        return rows

    def wants(self, place: Site) -> bool:
        """Whether anything would be done with a tensor of this place now."""
        return self.rows is not None and self.plan.task(place.kind, place.module) is not None

    def receive(self, place: Site, tensor: Tensor, path: str, weight: int | Tensor | None = None) -> None:
        """Measure a tensor; an error is told and does not come out.

        Parameters
        ----------
        place, path : what it is
        tensor : borrowed, attached to its graph or not
        weight : how many elements it is the mean of, if it is one; means become one weighted mean
        """
        if (rows := self.rows) is None or (task := self.plan.task(place.kind, place.module)) is None:
            return
        kernels = self.kernels
        try:
            if task.is_plain and weight is None and kernels is not None and kernels.takes(tensor):
                kernels.look(tensor, task.fields, rows.entry(place, path, task).look)
            elif has_numbers(tensor):
                self._receive_any(rows, rows.entry(place, path, task), detached(tensor), weight)
            else:
                self.unreadable += 1
        except Exception as error:
            self.error_guard.report_internal(f"measuring {place}", error)

    def receive_difference(self, place: Site, after: Tensor, before: Tensor, path: str) -> None:
        """Measure ``after - before``; it is not made where nobody has to see it, and otherwise takes the place of `before`."""
        if (rows := self.rows) is None or (task := self.plan.task(place.kind, place.module)) is None:
            return
        kernels = self.kernels
        try:
            if task.is_plain and kernels is not None and kernels.takes_difference(after, before):
                kernels.look_at_difference(after, before, task.fields, rows.entry(place, path, task).look)
            else:
                self.receive(place, torch.sub(after.detach(), before, out=before), path)
        except Exception as error:
            self.error_guard.report_internal(f"measuring {place}", error)

    def _receive_any(self, rows: Rows, entry: Entry, tensor: Tensor, weight: int | Tensor | None) -> None:
        entry.is_mean = weight is not None
        if type(tensor) is not Tensor and is_spread(tensor):
            self._receive_part(rows, entry, tensor, weight)
            return
        if entry.task.fields:
            self._measure_fields(entry, tensor, weight)
        if entry.task.measurers:
            self._measure_all(rows, entry, entry.task.measurers, tensor)

    def _receive_part(self, rows: Rows, entry: Entry, tensor: Tensor, weight: int | Tensor | None) -> None:
        """Measure what lies here of a tensor that is spread over ranks."""
        if (found := local_part(tensor, self.is_agreed)) is None:
            self.unreadable += 1
            return
        local, part = found
        if part is not None:
            rows.parts[entry.key] = part
        if entry.task.fields:
            self._measure_fields(entry, local, weight)
        is_shard = part is not None and part.is_shard
        for subscription in entry.task.measurers:
            if is_shard and subscription.subscriber.needs_whole:
                self._measure_whole(rows, entry, subscription, tensor)
            else:
                self._measure_all(rows, entry, (subscription,), local)

    def _measure_whole(self, rows: Rows, entry: Entry, subscription: Registered, tensor: Tensor) -> None:
        """Measure what says nothing of a shard: NaN, unless all of the tensor may be gathered."""
        subscriber = subscription.subscriber
        if subscriber.gather and self.is_agreed:
            self._measure_all(rows, entry, (subscription,), whole(tensor))
            return
        message = entry.message(rows.stamp)
        if subscription not in self._told:
            self._told.add(subscription)
            log.warning(
                "%r needs whole tensors, and %s of %s is spread over ranks: it publishes NaN; "
                "gather=True lets it gather them at the steps it samples",
                *(subscriber, message.kind, message.series_name),
            )
        self._add_own(entry, subscription, self.error_guard.call(subscription, "measure", subscriber.unknown, message))

    def _measure_fields(self, entry: Entry, tensor: Tensor, weight: int | Tensor | None) -> None:
        fields, random = entry.task.fields, self._random(tensor, entry.task)
        if not tensor.is_cpu or isinstance(weight, Tensor):
            self._add_on_device(entry, tensor, 1 if weight is None else weight, random)
        elif (record := measure(tensor, fields, random, compiled=self.kernels is not None)) is None:
            self.unreadable += 1
        elif weight != 0:
            entry.add_record(record if weight is None else record.repeated(weight))

    def _add_on_device(
        self, entry: Entry, tensor: Tensor, weight: int | Tensor, random: torch.Generator | None
    ) -> None:
        vectors = measure_vectors(tensor, entry.task.fields, entry.pivot, weight, random)
        if vectors is None:
            self.unreadable += 1
        else:
            entry.add_on_device(vectors)

    def _random(self, tensor: Tensor, task: Task) -> torch.Generator | None:
        """Return our own source of randomness on the device of `tensor`, if one is needed."""
        if "sampled_codes" not in task.fields:
            return None
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]

    def _measure_all(self, rows: Rows, entry: Entry, measurers: Iterable[Registered], tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()  # authors of metrics need not know of sparse gradients
        message = entry.message(rows.stamp, tensor)
        for subscription in measurers:
            self._measure_own(entry, subscription, message, tensor)

    def _measure_own(
        self, entry: Entry, subscription: Registered, message: Message | MessageBundle, tensor: Tensor
    ) -> None:
        if subscription.disabled:  # since the step began
            return
        version = None if tensor.is_inference() else tensor._version
        with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
            row = self.error_guard.call(subscription, "measure", subscription.subscriber.measure, message)
        self._add_own(entry, subscription, row)
        if version is not None and tensor._version != version:
            self.error_guard.disable(
                subscription, f"it changed {entry.place.kind!r} of {entry.place.module or 'the network'} in place"
            )

    def _add_own(self, entry: Entry, subscription: Registered, row: Tensor | None) -> None:
        if isinstance(row, Tensor):
            is_first = not entry.measured or subscription not in entry.measured
            stage = "keep" if is_first else "merge"  # what has nothing to merge with pardons no failure to merge
            self.error_guard.call(subscription, stage, partial(entry.add_measured, subscription), row)

    def receive_together(self, tensors: Mapping[str, Tensor]) -> None:
        """Hand the tensors of one call of the loss module to those who measure them side by side."""
        if self.rows is None or not all(map(has_numbers, tensors.values())):
            return
        if self.plan.together and (self.is_agreed or not any(map(is_spread, tensors.values()))):
            tensors = {kind: whole(tensor) if is_spread(tensor) else tensor for kind, tensor in tensors.items()}
        for subscription in self.plan.together:
            messages = {
                kind: NetworkMessage(self.rows.stamp, kind, tensors[kind])
                for kind in subscription.kinds
                if kind in tensors
            }
            if len(messages) < len(subscription.kinds):
                continue
            entry = self.rows.entry_together(subscription)
            self._measure_own(entry, subscription, MessageBundle(messages), tensors[subscription.kinds[0]])
