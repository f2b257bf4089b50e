"""Integers that stand for places: all that a traced graph can carry."""

import weakref
from typing import Protocol

from torch import Tensor

from ikkuna.export.rows.site import Site

__all__ = ["BASE", "SLOTS", "VIEW", "Sink", "Slots"]

VIEW, BASE = 1, 2
"""A gradient has three slots in a row: of an output, of an output that is a view, of that view's base."""


class Sink(Protocol):
    """What a slot belongs to: it takes what compiled graphs see."""

    def take_traced(self, place: Site, tensor: Tensor, path: str, role: int) -> None:
        """Take a tensor of the user's, detached; never raise."""

    def entered(self, counts: bool) -> None:
        """Take the call of a compiled root; never raise."""


class Slots:
    """Numbers of places, process-wide, since a compiled graph outlives the objects it was traced with."""

    def __init__(self) -> None:
        self._next = 0
        self._places: dict[int, tuple[weakref.ref[Sink], Site, int]] = {}

    def assign(self, sink: Sink, kind: str, module: str | None) -> Site:
        """Return a place of `sink` that has three new slots; they go with the sink."""
        place = Site(kind, module, self._next)
        self._next += 3
        numbers = range(place.slot, self._next)
        reference = weakref.ref(sink, lambda _: [self._places.pop(number, None) for number in numbers])
        for role, number in enumerate(numbers):
            self._places[number] = reference, place, role
        return place

    def take(self, number: int, tensor: Tensor, path: str) -> None:
        """Hand a tensor to the sink of a slot, if there still is one."""
        if (entry := self._places.get(number)) is not None and (sink := entry[0]()) is not None:
            sink.take_traced(entry[1], tensor, path, entry[2])

    def tick(self, number: int, counts: bool) -> None:
        """Tell the sink of a slot that its compiled root is called."""
        if (entry := self._places.get(number)) is not None and (sink := entry[0]()) is not None:
            sink.entered(counts)


SLOTS = Slots()
