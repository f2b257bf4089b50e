"""The parameters that are looked at, and which optimizer owns which."""

import weakref
from collections.abc import Iterable

from torch.optim import Optimizer

from ikkuna.modules import NamedModule, NamedParameter, parameters_of

__all__ = ["TrackedParameters"]


class TrackedParameters:
    """Parameters of the modules that are looked at, resolved by identity.

    Optimizers are found by the tensors in their groups, never told; the answer is kept as long as the groups keep their size.
    """

    def __init__(self) -> None:
        self.all: tuple[NamedParameter, ...] = ()
        self._by_id: dict[int, NamedParameter] = {}
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, tuple[NamedParameter, ...]]] = (
            weakref.WeakKeyDictionary()
        )

    def track(self, modules: Iterable[NamedModule]) -> None:
        """Look at the parameters of these modules, and no others."""
        self.all = parameters_of(modules)
        self._by_id = {id(named.parameter): named for named in self.all}
        self._owned.clear()

    def of(self, optimizer: Optimizer) -> tuple[NamedParameter, ...]:
        """Return the tracked parameters that an optimizer owns."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._owned.get(optimizer)
        if known is None or known[0] != size:
            held = (self._by_id.get(id(p)) for group in optimizer.param_groups for p in group["params"])
            known = self._owned[optimizer] = size, tuple(dict.fromkeys(named for named in held if named is not None))
        return known[1]

    def orphans(self) -> tuple[NamedParameter, ...]:
        """Return those that no optimizer seen so far owns."""
        owned = {id(named.parameter) for _, group in self._owned.values() for named in group}
        return tuple(named for named in self.all if id(named.parameter) not in owned)

    def all_owned_by(self, optimizers: Iterable[Optimizer]) -> bool:
        """Whether these optimizers own everything that can be trained."""
        owned = {id(named.parameter) for optimizer in optimizers for named in self.of(optimizer)}
        return all(id(named.parameter) in owned for named in self.all if named.parameter.requires_grad)
