"""Integers that stand for what a tap looks at: all that a traced graph can carry."""

import weakref
from typing import Protocol

from torch import Tensor

from ikkuna.export.recorder import Place

__all__ = ["BASE", "SLOTS", "VIEW", "Sink", "Slots", "observe"]

VIEW, BASE = 1, 2
"""A gradient has three slots in a row: of an output, of an output that is a view, of that view's base."""


class Sink(Protocol):
    """What a slot belongs to: it takes the tensors its taps see."""

    def receive(self, place: Place, tensor: Tensor, path: str, role: int, traced: bool) -> None:
        """Take a tensor of the user's, detached; never raise."""

    def entered(self, counts: bool) -> None:
        """Take the call of a compiled root; never raise."""


class Slots:
    """Numbers of places, process-wide, since a compiled graph outlives the objects it was traced with."""

    def __init__(self) -> None:
        self._next = 0
        self._places: dict[int, tuple[weakref.ref[Sink], Place, int]] = {}

    def assign(self, sink: Sink, place: Place) -> int:
        """Return the first of three new slots for a place of `sink`; they go with the sink."""
        first = self._next
        self._next += 3
        numbers = range(first, self._next)
        reference = weakref.ref(sink, lambda _: [self._places.pop(number, None) for number in numbers])
        for role, number in enumerate(numbers):
            self._places[number] = reference, place, role
        return first

    def receive(self, number: int, tensor: Tensor, path: str, traced: bool = False) -> None:
        """Hand a tensor to the sink of a slot, if there still is one."""
        if (entry := self._places.get(number)) is not None and (sink := entry[0]()) is not None:
            sink.receive(entry[1], tensor, path, entry[2], traced)

    def tick(self, number: int, counts: bool) -> None:
        """Tell the sink of a slot that its compiled root is called."""
        if (entry := self._places.get(number)) is not None and (sink := entry[0]()) is not None:
            sink.entered(counts)


SLOTS = Slots()


def observe(tensor: Tensor, slot: int, path: str, batch_sizes: Tensor | None = None) -> None:
    """Show a tensor to whoever owns the slot: the one door from torch into ikkuna.

    What belongs to a packed sequence has its `batch_sizes` as an attribute, as the sequence had: its rows tell nothing of time without.
    """
    seen = tensor.detach()
    if batch_sizes is not None:
        seen.batch_sizes = batch_sizes  # type: ignore[attr-defined]
    SLOTS.receive(slot, seen, path)
