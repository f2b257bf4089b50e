"""The operators that ikkuna adds to compiled graphs, and the numbers by which these name sites.

The compiler neither looks into these operators nor removes them.  Their bodies end where the eager hooks end, so a compiled step is
measured by the same code.  They keep no tensor: the compiler reuses its memory as soon as the operator has returned.

A graph receives the number of a module as a tensor, because it would be compiled again for each module if the number were a constant.
The number of a call is a constant: the compiler merges operators with equal arguments, such as two calls of one module
that return the same tensor, or receive the same gradient.
"""

import weakref
from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ikkuna.export.rows.site import Site
from ikkuna.torch_internals import current_trace, insert_as_constant

__all__ = [
    "BASE",
    "GRADIENTS",
    "INPUTS",
    "OUTPUTS",
    "VIEW",
    "GraphReceiver",
    "ObservedSites",
    "Sites",
    "next_call",
    "observe",
    "root_called",
]

INPUTS, OUTPUTS, GRADIENTS, VIEW, BASE = range(5)
"""Role of a tensor for a module: an input, an output, the gradient of an output, of an output that is a view, of the base of that view."""


class ObservedSites(NamedTuple):
    """The sites of one module's tensors, or of the network's; ``None`` if no subscriber wants them.

    Parameters
    ----------
    inputs, outputs, gradients : Site or None
        The sites of what the module receives, of what it returns, and of the gradients with respect to that.
    """

    inputs: Site | None = None
    outputs: Site | None = None
    gradients: Site | None = None


class GraphReceiver(Protocol):
    """Receives what compiled graphs measure."""

    def observed(self, site: Site, tensor: Tensor, path: str, role: int) -> None:
        """Handle a tensor, detached; never raise."""

    def root_called(self, counts: bool) -> None:
        """Handle the call of a compiled root; never raise."""


class Sites:
    """The sites of one exporter; each is one object."""

    def __init__(self) -> None:
        self._receiver: weakref.ref[GraphReceiver] | None = None
        self._sites: dict[tuple[str, str | None], Site] = {}
        self._numbers: dict[str, Tensor] = {}

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
        return site if site is not None else self._sites.setdefault((kind, module), Site(kind, module))

    def number(self, module: str, observed: ObservedSites) -> Tensor:
        """Return a tensor with the number by which compiled graphs name a module, and set the sites of the module.

        The network has an empty name.
        """
        self.create_numbers((module,))
        tensor = self._numbers[module]
        number = int(tensor)
        reference = _NUMBERED[number][0] if number in _NUMBERED else self._reference(number)
        _NUMBERED[number] = reference, observed
        return tensor

    def create_numbers(self, modules: Iterable[str]) -> None:
        """Create the numbers of modules that have none."""
        if names := [name for name in modules if name not in self._numbers]:
            with torch.inference_mode(False):  # autograd saves the number for the backward
                numbers = torch.tensor([next(_NEXT_NUMBER) for _ in names], dtype=torch.int64, device="cpu")
                self._numbers.update(zip(names, (number.clone() for number in numbers.unbind()), strict=True))

    def _reference(self, number: int) -> "weakref.ref[Sites]":
        return weakref.ref(self, lambda _: _NUMBERED.pop(number, None))


# process-wide: a graph outlives the objects it was traced with
_NUMBERED: dict[int, tuple["weakref.ref[Sites]", ObservedSites]] = {}
_NEXT_NUMBER = count()
_CALLS: "weakref.WeakKeyDictionary[Any, count[int]]" = weakref.WeakKeyDictionary()


def next_call() -> int:
    """Return how many calls were traced before into the graph that is being compiled."""
    return next(_CALLS.setdefault(current_trace(), count()))


insert_as_constant(next_call)


def _find(number: Tensor) -> tuple[GraphReceiver, ObservedSites] | None:
    reference, observed = _NUMBERED.get(int(number), (None, None))
    sites = reference() if reference is not None else None
    receiver = sites.receiver if sites is not None else None
    return None if receiver is None or observed is None else (receiver, observed)


# torch.library.custom_op would add six Python calls to each call
torch.library.define("ikkuna::observe", "(Tensor tensor, Tensor number, int role, str path, int call) -> ()")
torch.library.define("ikkuna::root_called", "(Tensor number, bool counts, int call) -> ()")


@torch.library.impl("ikkuna::observe", "CompositeExplicitAutograd")
def _observe(tensor: Tensor, number: Tensor, role: int, path: str, call: int) -> None:
    if (found := _find(number)) is not None:
        receiver, observed = found
        if (site := observed[min(role, GRADIENTS)]) is not None:
            receiver.observed(site, tensor.detach(), path, role)


@torch.library.impl("ikkuna::root_called", "CompositeExplicitAutograd")
def _root_called(number: Tensor, counts: bool, call: int) -> None:
    if (found := _find(number)) is not None:
        found[0].root_called(counts)


def _trace_nothing(*args: object) -> None:
    """Stand for the operators while the compiler traces."""


torch.library.register_fake("ikkuna::observe", _trace_nothing)
torch.library.register_fake("ikkuna::root_called", _trace_nothing)

observe = torch.ops.ikkuna.observe.default
"""Pass a tensor of the module with a number to the receiver; `call` differs between the operators of a graph."""

root_called = torch.ops.ikkuna.root_called.default
"""Report a call of a root to the receiver; `counts` if it is in training mode with gradients."""

# An operator that returns nothing is removed as dead code without this mark.
torch.fx.node.has_side_effect(observe)
torch.fx.node.has_side_effect(root_called)
