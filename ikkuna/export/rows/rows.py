"""What was measured in one step, merged as it comes and copied to the host once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ikkuna.distributed.dtensor import Part
from ikkuna.export.messages.message import Message
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.rows.plan import Task
from ikkuna.export.rows.site import Site
from ikkuna.export.subscriber.registered import Registered
from ikkuna.numerics.statistics import Record, merge
from ikkuna.numerics.statistics.device import from_vectors, merge_vectors
from ikkuna.numerics.statistics.native.look import Look, record_of

__all__ = ["Entry", "Rows", "Sharing"]

_NOTHING = Task(frozenset(), (), ())
_MERGE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "last": lambda known, row: row,
}


@dataclass(slots=True, eq=False)
class Entry:
    """All that was measured of one kind, module and path.

    Statistics stay as they were made until the step is over, those of a host tensor as what the compiled kernels fill,
    those of a device tensor as vectors on the device; then they become a `Record`.
    Where each call was the mean of many elements (a loss), what comes out is their one weighted mean.

    One entry serves step after step: thousands of new objects a step would have the garbage collector look through
    everything there is, torch included, which takes a fifth of a second.
    """

    key: tuple[object, ...]
    place: Site
    path: str
    task: Task
    look: Look = field(default_factory=Look)
    record: Record | None = None
    pivot: float = 0.0
    is_mean: bool = False
    on_device: dict[str, Tensor] | None = None
    measured: dict[Registered, Tensor] | None = None

    def message(self, stamp: Stamp, data: Any = None, record: Record | None = None) -> Message:
        """Return the message that tells of it."""
        return self.place.message(stamp, self.path, data, record)

    def add_record(self, record: Record) -> None:
        """Take in statistics of more elements."""
        self.record = record if self.record is None else merge(self.record, record)

    def add_on_device(self, vectors: dict[str, Tensor]) -> None:
        """Take in statistics of more elements, on their device."""
        known = self.on_device
        if known is not None:
            vectors = {name: merge_vectors(name, known[name], vector) for name, vector in vectors.items()}
        self.on_device = vectors

    def add_measured(self, subscription: Registered, row: Tensor) -> None:
        """Take in a subscriber's own row."""
        row = row.detach().to(torch.float64, copy=True)
        if self.measured is None:
            self.measured = {}
        elif (known := self.measured.get(subscription)) is not None:
            row = _MERGE[subscription.subscriber.merge](known, row)
        self.measured[subscription] = row

    def parts(self) -> list["_Part"]:
        """Return the tensors to be copied, each with the dictionary and key it belongs to."""
        holders: tuple[dict[Any, Tensor] | None, ...] = (self.on_device, self.measured)
        return [(holder, key, tensor) for holder in holders if holder for key, tensor in holder.items()]

    def settle(self) -> None:
        """Make one record of everything that has reached the host; a second call does nothing."""
        if (seen := record_of(self.look, self.task.fields)) is not None:
            self.look[0] = 0  # it has seen nothing any more
            self.add_record(seen)
        if self.on_device:
            self.add_record(from_vectors(self.on_device, self.task.fields, self.pivot))
            self.on_device = None

    def average(self) -> None:
        """Make one number of what was the mean of many."""
        if self.is_mean and self.record is not None and self.record.n:
            self.record = Record.of(self.record.mean)

    def clear(self) -> None:
        """Be as new, but for the pivot: the next step's device rows are about this one's mean, and lose no digits to a large offset."""
        if self.record is not None and self.record.center is not None:
            self.pivot = self.record.center
        self.look[0] = 0
        self.record = self.on_device = self.measured = None
        self.is_mean = False
        self.task = _NOTHING  # nobody is kept alive who wanted it


class Sharing(Protocol):
    """What makes one of the rows of all ranks."""

    def arrived(self, rows: "Rows") -> bool:
        """Whether the rows of all ranks are here; called once this rank's are on the host."""

    def merge_into(self, rows: "Rows") -> None:
        """Put what all ranks have in the place of what this one has, waiting if need be."""


_Part = tuple[dict[Any, Tensor], Any, Tensor]


class Rows:
    """The entries of one step in the order they were first seen, and their one copy to the host.

    Parameters
    ----------
    stamp : of the step
    spare : entries that may be used again, by their keys

    Attributes
    ----------
    parts : for tensors that are spread over ranks, what lies here of them, by the key of the entry
    sharing : what makes one of the rows of all ranks; ``None`` in one process
    """

    def __init__(self, stamp: Stamp, spare: dict[tuple[object, ...], Entry]) -> None:
        self.stamp = stamp
        self._spare = spare
        self.entries: dict[tuple[object, ...], Entry] = {}
        self.skipped = False
        self.parts: dict[tuple[object, ...], Part] = {}
        self.sharing: Sharing | None = None
        self._overflows: list[Tensor] = []
        self._copies: list[tuple[list[_Part], Tensor, torch.cuda.Event | None]] = []

    def entry(self, place: Site, path: str, task: Task) -> Entry:
        """Return the entry of a leaf or parameter at a place, a fresh one if there is none yet."""
        key = (place, path)
        return self.entries.get(key) or self._fresh(key, place, path, task)

    def entry_together(self, subscription: Registered) -> Entry:
        """Return the entry of what one subscriber measures side by side."""
        if (entry := self.entries.get((subscription,))) is None:
            task = Task(frozenset(), (subscription,), (subscription,))
            entry = self.entries[subscription,] = Entry((subscription,), Site(subscription.kinds[0]), "", task)
        return entry

    def _fresh(self, key: tuple[object, ...], place: Site, path: str, task: Task) -> Entry:
        if (entry := self._spare.pop(key, None)) is None:
            entry = Entry(key, place, path, task)
        entry.task = task
        self.entries[entry.key] = entry
        return entry

    def keep(self, entry: Entry) -> None:
        """Keep an entry that was delivered for a step to come, unless it is one subscriber's."""
        if entry.key[0] is entry.place:
            entry.clear()
            self._spare[entry.key] = entry

    def drop(self, kinds: frozenset[str]) -> None:
        """Forget what was seen of some kinds: a closure is evaluated again.

        From then on the stamp is another one, though equal: by that a metric knows that it has to forget what it kept, too.
        """
        self.stamp = replace(self.stamp)
        self.entries = {key: entry for key, entry in self.entries.items() if entry.place.kind not in kinds}

    def note_overflow(self, found_inf: Tensor | None) -> None:
        """Take a fused optimizer's flag that its gradient scaler found an Inf and the weights stayed as they were."""
        if found_inf is not None:
            self._overflows.append(found_inf.detach().clone())

    def start_copy(self) -> None:
        """Send every row to the host, all of one device in one non-blocking copy."""
        by_device: dict[torch.device, list[_Part]] = {}
        for entry in self.entries.values():
            if entry.on_device is None and entry.measured is None:
                continue
            for part in entry.parts():
                by_device.setdefault(part[2].device, []).append(part)
        for parts in by_device.values():
            packed = torch.cat([tensor.reshape(-1).double() for _, _, tensor in parts])
            self._copies.append((parts, *_to_host(packed)))

    def arrived(self) -> bool:
        """Whether all copies have reached the host, and the rows of other ranks are here."""
        if not all(event is None or event.query() for _, _, event in self._copies):
            return False
        return self.sharing is None or self.sharing.arrived(self)

    def unpack(self) -> Iterator[Entry]:
        """Yield the entries with everything on the host and of all ranks, waiting if need be."""
        if self.sharing is not None:
            self.sharing.merge_into(self)
        self._fetch()
        for entry in self.entries.values():
            entry.settle()  # one by one, so that no more than one record is there at a time
            if entry.is_mean:
                entry.average()
            yield entry

    def land(self) -> None:
        """Make records of what was measured here, waiting for its copy if need be; a second call does nothing."""
        self._fetch()
        for entry in self.entries.values():
            entry.settle()

    def _fetch(self) -> None:
        for parts, packed, event in self._copies:
            if event is not None:
                event.synchronize()
            offset = 0
            for holder, key, tensor in parts:
                holder[key] = packed[offset : offset + tensor.numel()].reshape(tensor.shape)
                offset += tensor.numel()
        self._copies = []
        self.skipped = self.skipped or any(bool(flag.item()) for flag in self._overflows)
        self._overflows = []


def _to_host(packed: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
    if packed.device.type != "cuda":
        return packed.cpu(), None
    pinned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    pinned.copy_(packed, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(packed.device))
    return pinned, event
