"""The parameters that are looked at, and which optimizer owns which."""

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import is_distributed
from ikkuna.modules import NamedModule, NamedParameter, parameters_of

__all__ = ["TrackedParameters"]

log = logging.getLogger("ikkuna")


class TrackedParameters:
    """Parameters of the modules that are looked at, resolved by identity.

    Optimizers are found by the tensors in their groups, never told; the answer is kept as long as the groups keep their size.
    """

    def __init__(self) -> None:
        self.all: tuple[NamedParameter, ...] = ()
        self._modules: tuple[NamedModule, ...] = ()
        self._by_id: dict[int, NamedParameter] = {}
        self._nodes: dict[int, tuple[torch.dtype, torch.device, Any]] = {}
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, tuple[NamedParameter, ...]]] = (
            weakref.WeakKeyDictionary()
        )

    def track(self, modules: Iterable[NamedModule]) -> None:
        """Look at the parameters of these modules, and no others."""
        self._modules = tuple(modules)
        self.all = parameters_of(self._modules)
        self._by_id = {id(named.parameter): named for named in self.all}
        self._owned.clear()
        self._nodes.clear()
        for named in self.all:
            if named.parameter.requires_grad:
                self.node(named.parameter)  # now, since a compiled graph's operators cannot ask for it

    def refresh(self) -> None:
        """Find the parameters again if the user has put others in their place, as ``load_state_dict(assign=True)`` does."""
        held = [p for named in self._modules for p in named.module._parameters.values() if p is not None]
        unknown = [p for p in held if id(p) not in self._by_id]
        if not unknown:
            return
        if any(is_distributed(named.parameter) for named in self.all) and not any(map(is_distributed, unknown)):
            return  # FSDP has put shards that are known together for a forward
        log.info("parameters were replaced; the new ones are looked at")
        self.track(self._modules)

    def find_shards(self, optimizer: Optimizer) -> None:
        """Look again before the step of an optimizer that owns shards, of which none is known: models can be sharded at any time."""
        if not self.of(optimizer) and any(
            is_distributed(p) for group in optimizer.param_groups for p in group["params"]
        ):
            self.refresh()

    def any_has_gradient(self) -> bool:
        """Whether a gradient is waiting for an optimizer."""
        return any(named.parameter.grad is not None for named in self.all)

    def any_reached_by_backward(self) -> bool:
        """Whether the backward that runs now accumulates into one of them; call it from a hook on a gradient."""
        nodes = (self.node(named.parameter) for named in self.all if named.parameter.requires_grad)
        return any(node is None or torch._C._will_engine_execute_node(node) for node in nodes)

    def node(self, parameter: torch.nn.Parameter) -> Any:
        """Return the node of autograd that adds to a parameter's gradient.

        ``None`` where it cannot be had, inside an operator, and for a shard: autograd adds to what FSDP puts together of it.
        """
        if is_distributed(parameter):
            return None
        dtype, device = parameter.dtype, parameter.device
        known = self._nodes.get(id(parameter))
        if known is not None and known[:2] == (dtype, device):  # another dtype or device has another node
            return known[2]
        node = None
        if not torch.nn.parameter.is_lazy(parameter):
            with torch.enable_grad():
                function = parameter.view_as(parameter).grad_fn
            if function is not None:
                node = function.next_functions[0][0]
                self._nodes[id(parameter)] = dtype, device, node
        return node

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
