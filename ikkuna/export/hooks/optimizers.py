"""Hears the hooks of optimizers: weights, gradients, updates."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import distribute_like, is_distributed, local_tensor
from ikkuna.export.hooks.hook_owner import HookOwner
from ikkuna.export.rows.site import Site
from ikkuna.modules import NamedParameter

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["OptimizerWatch"]


class OptimizerWatch(HookOwner):
    """Looks at parameters around the step of their optimizer.

    Weights are seen before the step, as the forward used them.
    Gradients are seen as the optimizer gets them: accumulated, unscaled, clipped, reduced.
    With a closure they are seen after the step, since before it they are those of the step before.
    An update is the difference of the weights around ``step()``, so nothing a user does between steps is part of it.

    Parameters
    ----------
    observer : who keeps the step

    Attributes
    ----------
    rates : learning rates of the open step, by the name or the number of the parameter group; of two that share a name,
        the second is numbered, as modules are: ``decay``, ``decay_1``
    in_closure : whether an optimizer is stepping that evaluates the model itself
    skipped_updates : updates that went unseen because there was no memory for a copy
    """

    def __init__(self, observer: "Session") -> None:
        super().__init__(observer)
        self.rates: dict[str, Any] = {}
        self.in_closure = False
        self.skipped_updates = 0
        self._before: list[tuple[Site, NamedParameter, Tensor]] = []
        self._by_hand = False

    def optimizer_starts(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the moment before an optimizer's step."""
        observer = self._observer
        was_open = observer.clock.is_open
        observer.parameters.find_shards(optimizer)
        if observer.blind or not observer.clock.optimizer_starts(optimizer):
            return
        if observer.bus.is_wanted("batch_finished"):
            self._see_rates(optimizer)
        self.in_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if not (was_open or observer.model.taps.is_compiled):
            observer.model.forwards.step_opened_late(self.in_closure)
        if not observer.recorder.plan.parameters:
            return
        owned = observer.parameters.of(optimizer)
        self._see_weights(owned)
        if observer.clock.first_optimizer:
            self._see_weights(observer.parameters.orphans())
        if not self.in_closure:
            self._see_gradients(owned, getattr(optimizer, "grad_scale", None))
        self._copy(owned)

    def optimizer_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the moment after an optimizer's step."""
        observer = self._observer
        if observer.blind or not observer.clock.optimizer_ended(optimizer):
            return
        if observer.recorder.plan.parameters and self.in_closure:
            self._see_gradients(observer.parameters.of(optimizer))
        self._see_updates()
        self._see_states(optimizer)
        if observer.recorder.rows is not None:
            observer.recorder.rows.note_overflow(getattr(optimizer, "found_inf", None))
        self.in_closure = False
        observer.clock.close_if_complete()

    def step_by_hand(self) -> None:
        """Take the end of a step that no optimizer makes: from the second one on everything is known as with an optimizer."""
        if self._observer.clock.is_open:
            self._see_gradients(self._observer.parameters.all)
            self._see_updates()
        self._by_hand = True
        self._observer.clock.close()

    def step_opened(self) -> None:
        """Look at the weights now, if no optimizer will tell when they change."""
        if self._by_hand and self._observer.recorder.plan.parameters:
            self._see_weights(self._observer.parameters.all)
            self._copy(self._observer.parameters.all)

    def step_closed(self) -> None:
        """Forget what the step left."""
        self._before = []
        self.rates = {}

    def _see_rates(self, optimizer: Optimizer) -> None:
        """Note the learning rates this step is made with, before a scheduler changes them; a rate on a device stays there."""
        for group in optimizer.param_groups:
            rate = group.get("lr")
            name = str(group.get("name", len(self.rates)))
            self.rates[_free(name, self.rates)] = rate.detach().clone() if isinstance(rate, Tensor) else rate

    def _see_weights(self, parameters: Iterable[NamedParameter]) -> None:
        for place, named in self._wanted("weights", "biases", parameters):
            self._observer.recorder.receive(place, named.parameter, named.path)

    def _see_gradients(self, parameters: Iterable[NamedParameter], scale: Tensor | None = None) -> None:
        for place, named in self._wanted("weight_gradients", "bias_gradients", parameters):
            if (grad := named.parameter.grad) is not None:
                if scale is not None:
                    grad = distribute_like(local_tensor(grad) / scale, grad)
                self._observer.recorder.receive(place, grad, named.path)

    def _see_updates(self) -> None:
        before, self._before = self._before, []
        recorder = self._observer.recorder
        for place, named, copy in before:
            if is_distributed(named.parameter):
                after = local_tensor(named.parameter.detach())
                recorder.receive(place, distribute_like(torch.sub(after, copy, out=copy), named.parameter), named.path)
            else:
                recorder.receive_difference(place, named.parameter, copy, named.path)

    def _see_states(self, optimizer: Optimizer) -> None:
        for kind in self._observer.recorder.plan.states:
            is_bias, field = kind.startswith("bias"), kind.split("_state_", 1)[1]
            for named in self._observer.parameters.of(optimizer):
                value = optimizer.state.get(named.parameter, {}).get(field) if named.is_bias == is_bias else None
                if isinstance(value, Tensor):
                    self._observer.recorder.receive(self._observer.place(kind, named.module), value, named.path)

    def _copy(self, parameters: Iterable[NamedParameter]) -> None:
        for place, named in self._wanted("weight_updates", "bias_updates", parameters):
            if not named.parameter.requires_grad:
                continue
            try:
                self._before.append((place, named, local_tensor(named.parameter.detach()).clone()))
            except RuntimeError:  # no memory: the update goes unseen, training goes on
                self.skipped_updates += 1

    def _wanted(
        self, weights: str, biases: str, parameters: Iterable[NamedParameter]
    ) -> Iterator[tuple[Site, NamedParameter]]:
        for named in parameters:
            place = self._observer.place(biases if named.is_bias else weights, named.module)
            if self._observer.recorder.wants(place):
                yield place, named


def _free(name: str, taken: Iterable[str]) -> str:
    """Return `name`, or with the first number behind it that makes it one of its own."""
    numbered = (f"{name}_{i}" for i in count(1))
    return name if name not in taken else next(free for free in numbered if free not in taken)
