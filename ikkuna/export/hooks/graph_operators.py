"""The operators that ikkuna adds to compiled graphs, and the numbers by which these name sites.

The compiler neither looks into these operators nor removes them.  Their bodies end where the eager hooks end, so a compiled step is
measured by the same code.  They keep no tensor: the compiler reuses its memory as soon as the operator has returned.
"""

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ikkuna.export.rows.site import Site

__all__ = ["BASE", "VIEW", "GraphReceiver", "Sites", "observe", "root_called"]

VIEW, BASE = 1, 2
"""A gradient has three slots in a row: that of an output, of an output that is a view, and of the base of that view."""


class GraphReceiver(Protocol):
    """Receives what compiled graphs measure."""

    def observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        """Handle a tensor, detached; never raise."""

    def root_called(self, counts: bool) -> None:
        """Handle the call of a compiled root; never raise."""


_SLOTS: dict[
    int, tuple["weakref.ref[Sites]", Site, int]
] = {}  # process-wide: a graph outlives the objects it was traced with
_COUNT = 3


def _new_slots() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += _COUNT


_FIRST_SLOT = _new_slots()


class Sites:
    """The sites of one exporter; each is one object, with three slots."""

    def __init__(self) -> None:
        self._receiver: weakref.ref[GraphReceiver] | None = None
        self._sites: dict[tuple[str, str | None], Site] = {}

    @property
    def receiver(self) -> GraphReceiver | None:
        """The object that receives what compiled graphs measure at these sites."""
        return self._receiver() if self._receiver is not None else None

    def set_receiver(self, receiver: GraphReceiver) -> None:
        """Set the receiver, which is held weakly."""
        self._receiver = weakref.ref(receiver)

    def __call__(self, kind: str, module: str | None = None) -> Site:
        """Return the site of a kind and module."""
        site = self._sites.get((kind, module))
        return site if site is not None else self._sites.setdefault((kind, module), self._new(kind, module))

    def _new(self, kind: str, module: str | None) -> Site:
        site = Site(kind, module, next(_FIRST_SLOT))
        slots = range(site.slot, site.slot + _COUNT)
        reference = weakref.ref(self, lambda _: [_SLOTS.pop(slot, None) for slot in slots])
        for role, slot in enumerate(slots):
            _SLOTS[slot] = reference, site, role
        return site


def _find(slot: int) -> tuple[GraphReceiver, Site, int] | None:
    reference, site, role = _SLOTS.get(slot, (None, None, 0))
    sites = reference() if reference is not None else None
    receiver = sites.receiver if sites is not None else None
    return None if receiver is None or site is None else (receiver, site, role)


@torch.library.custom_op("ikkuna::observe", mutates_args=())
def observe(tensor: Tensor, slot: int, path: str) -> None:
    """Pass a tensor to the receiver of a slot."""
    if (found := _find(slot)) is not None:
        receiver, site, role = found
        receiver.observed(site, tensor.detach(), path, role)


@torch.library.custom_op("ikkuna::root_called", mutates_args=())
def root_called(slot: int, counts: bool) -> None:
    """Report a call of a root to the receiver of a slot; `counts` if it is in training mode with gradients."""
    if (found := _find(slot)) is not None:
        found[0].root_called(counts)


@observe.register_fake
def _(tensor: Tensor, slot: int, path: str) -> None:
    return None


@root_called.register_fake
def _(slot: int, counts: bool) -> None:
    return None


# An operator that returns nothing is removed as dead code without this mark.
torch.fx.node.has_side_effect(torch.ops.ikkuna.observe.default)
torch.fx.node.has_side_effect(torch.ops.ikkuna.root_called.default)
