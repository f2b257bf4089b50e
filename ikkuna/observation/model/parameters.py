"""The parameters of the observed model, their gradients, and the optimizers that own them."""

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import holds_gradients, is_distributed, sharded_parameters
from ikkuna.support.failures import log, raise_users_exception, switched
from ikkuna.support.modules import NamedModule, NamedParameter, parameters_of
from ikkuna.support.torch_internals import (
    FLATTENED,
    autograd_enabled_inside_operators,
    current_node,
    nodes_behind,
    set_grad_enabled,
    will_execute,
)

_SENTINELS = 8


class _Contents:
    """The values of several dictionaries at one moment.

    They are compared at each sampled step, so that is done by functions of C alone.

    Parameters
    ----------
    dictionaries : list of dict
        The dictionaries.
    """

    def __init__(self, dictionaries: list[dict[str, Any]]) -> None:
        self._dictionaries = dictionaries
        self._sizes = list(map(len, dictionaries))
        self._names = [*chain.from_iterable(dictionaries)]
        self._values = [*chain.from_iterable(map(dict.values, dictionaries))]

    def have_changed(self) -> bool:
        """Whether a value was added, removed, replaced by another object, or got another name."""
        if list(map(len, self._dictionaries)) != self._sizes:
            return True
        # a comparison of lists would call __eq__ of tensors and of the user's modules
        values = chain.from_iterable(map(dict.values, self._dictionaries))
        return not (all(map(is_, values, self._values)) and [*chain.from_iterable(self._dictionaries)] == self._names)


GradientState = dict[int, tuple[int, int] | None]
"""Identity and version of the gradient of each parameter, by the parameter's id; ``None`` without a gradient."""


class Backward(Enum):
    """State of a running backward with respect to the parameters."""

    ACCUMULATES = "it adds to their gradients"
    CAPTURES = "torch.autograd.grad returns their gradients"
    CHECKPOINTED = "a reentrant checkpoint in it starts a backward of its own, which may reach them"
    PASSES_BY = "it does not reach them"


@dataclass(frozen=True, slots=True)
class _Owners:
    """The living optimizers that own parameters of a model.

    Parameters
    ----------
    known : int
        Number of optimizers that were looked at.
    numbers : frozenset of int
        The owners.
    shared : frozenset of int
        Ids of the parameters that several of them own.
    covered : bool
        Whether they own everything that can be trained.
    unowned : tuple of NamedParameter
        The observed parameters that none of them owns.
    """

    known: int
    numbers: frozenset[int]
    shared: frozenset[int]
    covered: bool
    unowned: tuple[NamedParameter, ...]


class TrackedParameters:
    """The parameters of a model, found by identity.

    Optimizers are found by the tensors in their parameter groups.  If nothing in the model can be trained, every optimizer
    counts as an owner: the model is then a frozen part of something that is trained.

    Attributes
    ----------
    all : tuple of NamedParameter
        The parameters of the observed modules.
    children, held : _Contents
        The modules and the parameters that the modules held when these were tracked.
    noted : dict or None
        The gradients that `note_gradients` has remembered.
    gradients_kept : bool or None
        Whether gradients were there before the first backward of the step; ``None`` if that is not known.
    """

    def __init__(self) -> None:
        self.all: tuple[NamedParameter, ...] = ()
        self._modules: tuple[NamedModule, ...] = ()
        self._roots: tuple[nn.Module, ...] = ()
        self.children, self.held = _Contents([]), _Contents([])
        self._of_model: dict[int, nn.Parameter] = {}
        self._spread: list[tuple[int, nn.Parameter]] = []  # neighbours are far from each other in the model
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._first_rates: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
        self._next = count(1)
        self._has_searched = False
        self._has_stepped: set[int] = set()
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]] = weakref.WeakKeyDictionary()
        self._observed: weakref.WeakKeyDictionary[Optimizer, tuple[frozenset[int], list[NamedParameter]]] = (
            weakref.WeakKeyDictionary()
        )
        self._owners: _Owners | None = None
        self.noted: GradientState | None = None
        self.gradients_kept: bool | None = None
        self._gradients_are_held = False
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # gradients from before

    # -- which parameters -----------------------------------------------------------------------------------------

    def track(self, modules: Iterable[NamedModule], roots: Iterable[nn.Module]) -> None:
        """Track the parameters of `roots`, and observe those of `modules`."""
        self._modules, self._roots = tuple(modules), tuple(roots)
        holders = self._note_contents()
        self._set_tracked(*self._resolve(holders))
        self._left = {
            key: (weakref.ref(grad), -1 if grad.is_inference() else grad._version)
            for key, parameter in self._of_model.items()
            if (grad := parameter.grad) is not None
        }

    def have_changed(self) -> bool:
        """Return whether the model has other modules or parameters than when they were tracked."""
        return self.children.have_changed() or self.held.have_changed()

    def refresh(self) -> None:
        """Find the parameters again if the user has replaced some, as ``load_state_dict(assign=True)`` and ``fully_shard`` do."""
        observed, of_model = self._resolve(self._note_contents())
        if not all(
            p.is_leaf for p in of_model.values()
        ):  # results of an inner step of meta-learning, in place of parameters
            return
        # FSDP gathers and frees the parameters at every step; they stay the same
        if of_model.keys() != self._of_model.keys() or _names(observed) != _names(self.all):
            log.info("parameters were replaced; the new ones are observed")
            self._set_tracked(observed, of_model)

    def _note_contents(self) -> list[nn.Module]:
        """Store what the modules hold now, and return the modules."""
        inside = (module for root in self._roots for module in root.modules())
        holders = list({id(m): m for m in (*inside, *(named.module for named in self._modules))}.values())
        changeable = [module for module in holders if not isinstance(module, torch.jit.ScriptModule)]
        self.children = _Contents([module._modules for module in changeable])
        self.held = _Contents([module._parameters for module in changeable])
        return holders

    def _resolve(self, holders: Iterable[nn.Module]) -> tuple[tuple[NamedParameter, ...], dict[int, nn.Parameter]]:
        """Return the observed parameters and all parameters of the model; those that FSDP has gathered are its shards."""
        shards = sharded_parameters(self._roots)
        observed = parameters_of(self._modules)
        if shards:
            observed = tuple(replace(n, parameter=shards.get(id(n.parameter), n.parameter)) for n in observed)
        held = (p for module in holders for p in module._parameters.values() if p is not None)
        everything = (*(shards.get(id(p), p) for p in held), *(named.parameter for named in observed))
        return observed, {id(p): p for p in everything}

    def _set_tracked(self, observed: tuple[NamedParameter, ...], of_model: dict[int, nn.Parameter]) -> None:
        self.all, self._of_model = observed, of_model
        every = list(of_model.items())
        stride = max(len(every) // _SENTINELS, 1)
        self._spread = [item for first in range(stride) for item in every[first::stride]]
        self._owned.clear()
        self._observed.clear()
        self._owners = self.noted = None

    def ids(self) -> set[int]:
        """Return the ids of all parameters of the model."""
        return set(self._of_model)

    def are_frozen(self) -> bool:
        """Whether no parameter of the model can be trained, so that any optimizer and any backward is the model's own."""
        return bool(self._roots) and next(self._trainable(), None) is None

    def _trainable(self) -> Iterator[nn.Parameter]:
        return (p for p in self._of_model.values() if p.requires_grad)

    # -- optimizers -----------------------------------------------------------------------------------------------

    def number(self, optimizer: Optimizer) -> int:
        """Return a number that identifies an optimizer as long as it lives."""
        if (number := self._numbers.get(optimizer)) is None:
            number = self._numbers[optimizer] = next(self._next)
            self._owners = None
            self._first_rates[optimizer] = [group.get("lr") for group in optimizer.param_groups]
        return number

    def owned_ids(self, optimizer: Optimizer) -> frozenset[int]:
        """Return the ids of the parameters of the model that an optimizer owns."""
        size = 0
        for group in optimizer.param_groups:
            size += len(group["params"])
        known = self._owned.get(optimizer)
        if known is None or known[0] != size:
            if self.held.have_changed():
                self.refresh()
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            owned = held if self.are_frozen() else held & self._of_model.keys()
            known = self._owned[optimizer] = size, frozenset(owned)
            self._owners = None
        return known[1]

    def of(self, optimizer: Optimizer) -> list[NamedParameter]:
        """Return the observed parameters that an optimizer owns."""
        owned = self.owned_ids(optimizer)
        known = self._observed.get(optimizer)
        if known is None or known[0] is not owned:
            known = self._observed[optimizer] = owned, [n for n in self.all if id(n.parameter) in owned]
        return known[1]

    def owners(self, stepped: Optimizer | None = None) -> "_Owners":
        """Return the living optimizers that own parameters of the model; `stepped` has just stepped.

        Several optimizer objects with the same parameter groups are one: wrappers of an optimizer share its groups.
        """
        if stepped is not None and (number := self._numbers[stepped]) not in self._has_stepped:
            self._has_stepped.add(number)
            self._owners = None
        if not self._has_searched:
            classes = _used_classes(Optimizer)
            for found in gc.get_referrers(*classes):  # an object refers to its class
                if type(found) in classes and hasattr(found, "param_groups"):
                    self.number(found)
            self._has_searched = True
        if self._owners is None or self._owners.known != len(self._numbers):
            self._owners = self._find_owners()
        return self._owners

    def optimizers(self) -> list[Optimizer]:
        """Return the living optimizers that own parameters of the model, in the order in which they were found."""
        owners = self.owners().numbers
        return [
            optimizer
            for optimizer, number in sorted(self._numbers.items(), key=lambda item: item[1])
            if number in owners
        ]

    def optimizers_of_others(self) -> list[Optimizer]:
        """Return the living optimizers that own no parameter of the model, in the order in which they were found."""
        self._has_searched = False
        owners = self.owners().numbers
        found = sorted(self._numbers.items(), key=lambda item: item[1])
        return [optimizer for optimizer, number in found if number not in owners and not self.owned_ids(optimizer)]

    def scheduled_in_vain(self) -> list[Optimizer]:
        """Return the living optimizers with scheduled rates that never step, while others with the same parameters do.

        The rates of the others are those that they were made with: no scheduler has them, and the loop does not copy rates.
        """
        living = self.optimizers() if self._has_stepped else []
        stepped = [each for each in living if self._numbers[each] in self._has_stepped]
        trained = frozenset[int]().union(*map(self.owned_ids, filter(_has_first_rates, stepped)))
        waiting = [each for each in living if each not in stepped and self.owned_ids(each) <= trained]
        return [each for each in waiting if self._is_scheduled(each)]

    def _is_scheduled(self, optimizer: Optimizer) -> bool:
        """Whether a scheduler has changed a rate since the optimizer was found; one on an accelerator is not read."""
        return any(
            "initial_lr" in group and isinstance(group["lr"], float) and group["lr"] != first
            for group, first in zip(optimizer.param_groups, self._first_rates[optimizer], strict=False)
        )

    def _find_owners(self) -> "_Owners":
        by_group: dict[int, tuple[int, frozenset[int]]] = {}
        for optimizer, number in list(self._numbers.items()):
            groups: list[Any] = getattr(optimizer, "param_groups", [])
            owned = self.owned_ids(optimizer) if groups else frozenset()
            if not owned:
                continue
            first = id(groups[0])
            if first not in by_group or number in self._has_stepped:
                by_group[first] = number, owned
        seen: set[int] = set()
        shared: set[int] = set()
        for _, owned in by_group.values():
            shared |= seen & owned
            seen |= owned
        covered = seen.issuperset(id(p) for p in self._trainable())
        unowned = tuple(named for named in self.all if id(named.parameter) not in seen)
        numbers = frozenset(number for number, _ in by_group.values())
        return _Owners(len(self._numbers), numbers, frozenset(shared), covered, unowned)

    # -- gradients ------------------------------------------------------------------------------------------------

    def any_has_gradient(self) -> bool:
        """Whether any parameter of the model has a gradient."""
        return any(p.grad is not None for p in self._of_model.values()) or any(map(holds_gradients, self._roots))

    def gradients_are_absent(self) -> bool:
        """Whether no parameter of the model has a gradient other than zero."""
        grads = (p.grad for p in self._of_model.values())
        return all(grad is None or _is_zero(grad) for grad in grads) and not any(map(holds_gradients, self._roots))

    def note_kept_gradients(self) -> None:
        """Remember whether one of a few parameters has a gradient other than zero before the first backward of a step."""
        present = [grad for _, parameter in self._spread[:_SENTINELS] if (grad := parameter.grad) is not None]
        is_unread = any(map(holds_gradients, self._roots)) or any(not g.is_cpu or is_distributed(g) for g in present)
        self.gradients_kept = None if is_unread else not all(map(_is_zero, present))

    def gradient_state(self) -> GradientState:
        """Return the identities and versions of all gradients."""
        return {key: _state(p.grad) for key, p in self._of_model.items()}

    def note_gradients(self, is_later: bool = False) -> None:
        """Remember a few gradients at the end of a backward, so that it can be seen later that they were cleared.

        Parameters
        ----------
        is_later : bool
            Whether the end of the backward, which has left gradients of all parameters, is past: those that are zero by now were cleared.
        """
        noted: GradientState = {}
        for key, parameter in self._spread:
            if (grad := parameter.grad) is not None or (is_later and parameter.requires_grad):
                if grad is None or (is_later and _is_zero(grad)):
                    noted[key] = None
                else:  # as `_state` does, without a call
                    noted[key] = id(grad), -1 if grad.is_inference() else grad._version
                if len(noted) == _SENTINELS:
                    break
        self.noted = noted
        self._gradients_are_held = not noted and any(map(holds_gradients, self._roots))

    def unowned(self) -> Sequence[NamedParameter]:
        """Return the trainable parameters that no optimizer owns, without those whose gradient is older than the watching.

        A teacher that was trained before may keep its last gradient.
        """
        everything = self.owners().unowned
        chosen = [
            named
            for named in everything
            if (parameter := named.parameter).requires_grad and not (self._left and self._is_left(parameter))
        ]
        return everything if len(chosen) == len(everything) else chosen  # the same object in each step, if possible

    def _is_left(self, parameter: nn.Parameter) -> bool:
        grad, (left, version) = parameter.grad, self._left.get(id(parameter), (None, -1))
        return (
            grad is not None
            and left is not None
            and left() is grad
            and (grad.is_inference() or grad._version == version)
        )

    def forget_gradients(self) -> None:
        """Forget what `note_gradients` has remembered, at the end of a step."""
        self.noted = None

    def gradients_cleared(self) -> bool:
        """Whether the gradients that the last backward left were cleared since, by removing them or by filling them with zeros."""
        noted = self.noted
        if noted is None:
            return False
        if not noted:
            return self._gradients_are_held and not self.any_has_gradient()
        grads = [(self._of_model[key].grad, state) for key, state in noted.items()]
        present = [(grad, state) for grad, state in grads if grad is not None]
        if not present:
            return not any(map(holds_gradients, self._roots))
        if any(_state(grad) == state for grad, state in present):
            return False
        return all(_is_zero(grad) for grad, _ in present)

    def backward_kind(self) -> Backward:
        """Return what the running backward does with the parameters; called from a hook on a gradient."""
        for parameter in self._of_model.values():
            if not parameter.requires_grad:
                continue
            node = self.accumulate_node(parameter)
            try:
                if node is None or will_execute(node):
                    return Backward.ACCUMULATES
            except RuntimeError as error:  # torch refuses the question for a parameter of torch.autograd.grad
                raise_users_exception(error)
                return Backward.CAPTURES
        return Backward.CHECKPOINTED if _has_checkpoint() else Backward.PASSES_BY

    @staticmethod
    def accumulate_node(parameter: nn.Parameter) -> Any:
        """Return the node of autograd that adds to a parameter's gradient.  It must not be kept beyond the step.

        ``None`` for a parameter without data, for a sparse one,
        and for a shard: autograd adds to the tensor that FSDP gathers from the shards.
        A node of a flat parameter would keep the shape that this has at the moment, and the next backward would fail.
        """
        if type(parameter) is not nn.Parameter and (is_distributed(parameter) or nn.parameter.is_lazy(parameter)):
            return None
        is_flat = getattr(parameter, FLATTENED, False)  # `is_flattened`, without its call
        if parameter.layout is not torch.strided or is_flat:
            return None
        function = switched([(set_grad_enabled, torch.is_grad_enabled(), True)], _node_of_view, parameter)
        return None if function is None else function.next_functions[0][0]


def _node_of_view(parameter: nn.Parameter) -> Any:
    if (
        function := parameter.view_as(parameter).grad_fn
    ) is None:  # inside an operator, which autograd does not look into
        with autograd_enabled_inside_operators():
            function = parameter.view_as(parameter).grad_fn
    return function


def _has_first_rates(optimizer: Optimizer) -> bool:
    first = optimizer.defaults.get("lr")
    return all("initial_lr" not in group and group.get("lr") is first for group in optimizer.param_groups)


def _used_classes(base: type[Optimizer]) -> set[type[Optimizer]]:
    """Return a class of optimizers and those derived from it, without the ones of torch that have never had an object.

    torch marks the ``step`` of a class when it makes the first object.  A search for objects takes longer the more classes there are.
    """
    found = {each for derived in base.__subclasses__() for each in _used_classes(derived)}
    is_unused = base.__module__.startswith("torch.optim") and not hasattr(base.step, "hooked")
    return found if is_unused else {base, *found}


def _has_checkpoint() -> bool:
    """Whether the running backward still has to go through a reentrant checkpoint."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_behind([current_node()]))


def _names(parameters: Iterable[NamedParameter]) -> list[tuple[str, bool, int]]:
    return [(named.name, named.is_bias, id(named.parameter)) for named in parameters]


def _state(grad: Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), -1 if grad.is_inference() else grad._version)


def _is_zero(grad: Tensor) -> bool:
    """Whether a gradient that was changed in place is zero now.

    The values on an accelerator are not read, because that waits for it: gradients are changed between two backwards to clear them.
    """
    if grad.device.type != "cpu" or is_distributed(grad):
        return True
    return not grad.is_sparse and not bool(torch.count_nonzero(grad))
