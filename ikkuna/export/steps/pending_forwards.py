"""The forwards of the open step, and the parts of the step that count."""

from ikkuna.export.steps.decisions import Decision, Merged
from ikkuna.export.steps.forward import (
    EARLIER_PART,
    FIRST_PART,
    GRADIENT_PARTS,
    Forward,
    Reach,
)

__all__ = ["MAX_PENDING", "PendingForwards"]

MAX_PENDING = 16
"""Forwards that are kept apart while no backward has reached them; beyond that the oldest two share a part."""


class PendingForwards:
    """The forwards of the open step, in the order in which they began.

    Forwards that a backward has reached are merged into one part when the next forward begins.

    Attributes
    ----------
    has_earlier : bool
        Whether forwards were merged.

    Examples
    --------
    >>> pending = PendingForwards()
    >>> first, second = pending.add([]), pending.add([])
    >>> first.part, second.part
    (4, 6)
    >>> first.reach = Reach.ACCUMULATED
    >>> pending.counting_parts()
    (1, 3, 4)
    """

    def __init__(self) -> None:
        self._pending: list[Forward] = []
        self._pool: list[Forward] = []
        self._used = 0
        self.has_earlier = False

    @property
    def latest(self) -> Forward | None:
        """The forward that began last."""
        return self._pending[-1] if self._pending else None

    @property
    def latest_compiled(self) -> Forward | None:
        """The latest forward of a compiled graph that no backward has reached."""
        waiting = (f for f in reversed(self._pending) if f.is_compiled and f.reach is Reach.NONE)
        return next(waiting, None)

    @property
    def reached(self) -> list[Forward]:
        """The forwards that a backward has reached."""
        return [f for f in self._pending if f.reach is not Reach.NONE]

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts of all pending forwards."""
        return tuple(part for f in self._pending for part in (f.part, f.provisional_part))

    def add(self, decisions: list[Decision]) -> Forward:
        """Add a forward, and append to `decisions` which parts are merged before."""
        for forward in [f for f in self._pending if f.reach is Reach.ACCUMULATED] if self._pending else ():
            decisions.append(Merged(forward.part, EARLIER_PART))
            self.has_earlier = True
            self._pending.remove(forward)
            forward.part = EARLIER_PART
        if len(self._pending) >= MAX_PENDING:
            oldest, second = self._pending[:2]
            decisions.append(Merged(oldest.part, second.part))
            self._pending.remove(oldest)
            oldest.part = second.part
        forward = self._unused()
        self._pending.append(forward)
        return forward

    def _unused(self) -> Forward:
        """Return an object of the pool, with a part that no pending forward has."""
        part = FIRST_PART
        if self._pending:
            taken = {f.part for f in self._pending}
            part = next(p for p in range(FIRST_PART, FIRST_PART + 2 * MAX_PENDING + 2, 2) if p not in taken)
        if self._used == len(self._pool):
            self._pool.append(Forward(part, self._used))
        forward = self._pool[self._used]
        self._used += 1
        forward.part, forward.reach = part, Reach.NONE
        forward.is_compiled = forward.is_of_parts = False
        return forward

    def discard(self, forwards: list[Forward]) -> None:
        """Discard forwards, and those that were merged."""
        for forward in forwards:
            self._pending.remove(forward)
            forward.part = -1
        self.has_earlier = False

    def clear(self) -> None:
        """Discard all forwards at the end of a step, so that their objects can be used again."""
        self.discard(list(self._pending))
        for forward in self._pool[: self._used]:
            forward.part = -1
        self._used = 0

    def counting_parts(self) -> tuple[int, ...]:
        """Return the parts whose gradients are there."""
        parts = [*GRADIENT_PARTS, EARLIER_PART] if self.has_earlier else [*GRADIENT_PARTS]
        used = self.reached
        if not used and not self.has_earlier:
            used = self._pending  # the backward could not be seen
        for forward in used:
            parts.append(forward.part)
            if forward.reach is Reach.CAPTURED:
                parts.append(forward.provisional_part)
        return tuple(parts)
