"""Observes parameters around the steps of optimizers: weights, gradients, updates, optimizer states and learning rates."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ikkuna.distributed.dtensor import distribute_like, divided, is_distributed, local_tensor
from ikkuna.export.hooks.call_stack import running_steps
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.learning_rates import add_rates, has_no_rate
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.export.messages.kinds import UNCLIPPED_KINDS
from ikkuna.export.model.untrained import UntrainedParameters
from ikkuna.export.rows.plan import Plan
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.step_tracker import State
from ikkuna.logger import log
from ikkuna.modules import NamedParameter
from ikkuna.numerics.elements import has_numbers
from ikkuna.signal_handlers import raise_users_exception

__all__ = ["OptimizerHooks"]

_SCALED_KINDS = frozenset(("layer_gradients", *UNCLIPPED_KINDS))
_LOGGED_RESCALED = 3  # a training that begins, or is resumed, with a scaler changes it once

_Sites = tuple[tuple[NamedParameter, ...], dict[int, Site]]
"""All observed parameters, and the sites of those of which a kind is wanted."""


class OptimizerHooks:
    """Reports steps of optimizers to the tracker, and records what they read and write.

    Weights are recorded before the step, as the forward has used them.  Gradients are recorded as the optimizer receives them:
    accumulated, unscaled, clipped and reduced; with a closure after the step, which has computed them.
    An update is the difference of the weights around the step, without what the user changes between steps.
    If several optimizers step with one parameter, its update is the sum of theirs.
    Gradients of parameters that no optimizer has are recorded with those of the first optimizer that steps.

    Parameters
    ----------
    context : HookContext
    loss : LossHooks
        Assigns losses to optimizers.

    Attributes
    ----------
    rates : dict
        Learning rates of the open step by the name or number of the parameter group; if two groups share a name,
        the second one is numbered: ``decay``, ``decay_1``.
    skipped_updates : int
        Number of updates that were not recorded because the weights were freed, or there was no memory for a copy.
    untrained : UntrainedParameters
        Logs which trainable parameters are not trained.
    """

    def __init__(self, context: HookContext, loss: LossHooks) -> None:
        self.context = context
        self._loss = loss
        self.rates: dict[str, Any] = {}
        self.skipped_updates = 0
        self.untrained = UntrainedParameters()
        self._before: dict[int, Tensor] = {}  # copies of weights, by the id of the parameter
        self._recorded: dict[str, set[int]] = {}
        self._sites: weakref.WeakKeyDictionary[Plan, dict[str, _Sites]] = weakref.WeakKeyDictionary()
        self._by_hand = False
        self._rescaled = 0

    # -- hooks ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of an optimizer's step."""
        context = self.context
        if context.is_off:
            return
        parameters, tracker = context.parameters, context.tracker
        owned = parameters.owned_ids(optimizer)
        closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if not owned or (not closure and self._creates_state(optimizer)):
            return
        number = parameters.number(optimizer)
        running, scaler = running_steps()
        outer = [parameters.number(other) for other in running[1:]]
        context.apply(tracker.optimizer_begins(number, owned, closure=closure, running=outer))
        if not tracker.optimizers.is_stepping(number):
            return
        if (scaler is not None or context.loss_scale.is_used) and context.loss_scale.set_scaler(scaler):
            self._drop_scaled()
        if "batch_finished" in context.recorder.plan.kinds or context.observer is not None:
            add_rates(optimizer, self.rates)
        unowned = parameters.known_owners().unowned
        if not closure and (unowned or self.untrained.settled is not parameters.all):
            self.untrained.note_gradients(parameters.all, unowned)
        if not context.recorder.plan.parameters:
            return
        observed = parameters.of(optimizer)
        self._record_weights(parameters.all if not self._recorded else observed, observed)
        if not closure:
            self._record_gradients(observed, getattr(optimizer, "grad_scale", None))
            if unowned:
                self._record_unowned()

    def _creates_state(self, optimizer: Optimizer) -> bool:
        """Return whether this is no step of training: ``torch.distributed.checkpoint`` creates the state of an optimizer so."""
        number = self.context.parameters.number(optimizer)
        return self.context.tracker.is_between_steps(number) and has_no_rate(optimizer)

    def optimizer_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the end of an optimizer's step."""
        context = self.context
        if context.is_off:
            return
        parameters, tracker = context.parameters, context.tracker
        number = parameters.number(optimizer)
        if not tracker.optimizers.is_stepping(number):
            if parameters.owned_ids(optimizer):
                context.apply(tracker.optimizer_ends(number))
            return
        owners = parameters.owners(optimizer)
        if (owners.unowned or self.untrained.settled is not parameters.all) and tracker.optimizers.in_closure:
            self.untrained.note_gradients(parameters.all, owners.unowned)
        if context.recorder.plan.parameters:
            observed = parameters.of(optimizer)
            if tracker.optimizers.in_closure:
                self._record_gradients(observed)
                self._record_unowned()
            shared = owners.shared
            self._record_updates([n for n in observed if id(n.parameter) not in shared] if shared else observed)
            self._record_states(optimizer, observed)
        self._loss.optimizer_ends(number, parameters.owned_ids(optimizer))
        if context.recorder.rows is not None:
            context.recorder.rows.note_overflow(getattr(optimizer, "found_inf", None))
        context.apply(tracker.optimizer_ends(number, owners.numbers, owners.covered))

    def step_by_hand(self) -> None:
        """Handle the end of a step that no optimizer makes; weights and updates are recorded from the second one on."""
        context = self.context
        if context.tracker.state is not State.IDLE:
            self._record_gradients(context.parameters.all)
            self._record_updates(context.parameters.all)
        self._by_hand = True
        context.apply(context.tracker.step_by_hand())

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_opened(self) -> None:
        """Record the weights now if no optimizer will report when they change."""
        if self._by_hand and self.context.recorder.plan.parameters:
            self._record_weights(self.context.parameters.all, self.context.parameters.all)

    def before_close(self) -> None:
        """Record the updates of parameters that several optimizers own."""
        self._record_updates(self.context.parameters.all)
        if self.untrained.settled is None:
            self.untrained.step_ended()

    def step_ended(self) -> None:
        """Forget everything about the step."""
        self._before = {}
        self._recorded.clear()
        self.rates = {}

    # -- measurements ---------------------------------------------------------------------------------------------

    def _record_weights(self, parameters: Iterable[NamedParameter], changing: Iterable[NamedParameter]) -> None:
        """Record weights, and copy those that change now and whose updates are wanted; on a device with few launches."""
        wanted, copies = self._wanted("weights", "biases", parameters), self._memory(changing)
        self.context.recorder.receive_all(((site, named.parameter, named.path) for site, named in wanted), copies)
        by_device: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for weights, copy in copies.values():  # those that were not copied by the kernel that measures them
            by_device.setdefault((weights.device, weights.dtype), []).append((copy, weights))
        for pairs in by_device.values():
            torch._foreach_copy_([copy for copy, _ in pairs], [weights for _, weights in pairs])

    def _record_gradients(self, parameters: Iterable[NamedParameter], scale: Tensor | None = None) -> None:
        wanted = self._wanted("weight_gradients", "bias_gradients", parameters)
        self.context.recorder.receive_all(
            (site, grad if scale is None else divided(grad, scale), named.path)
            for site, named in wanted
            if (grad := named.parameter.grad) is not None
        )

    def _record_unowned(self) -> None:
        """Record the gradients of parameters that no optimizer has, which no gradient scaler has unscaled."""
        for site, named in self._wanted(
            "weight_gradients", "bias_gradients", self.context.parameters.known_owners().unowned
        ):
            if (grad := named.parameter.grad) is not None:
                self.context.recorder.receive(site, self.context.loss_scale.removed_from(grad), named.path)

    def _drop_scaled(self) -> None:
        """Forget gradients from which another factor than that of the loss was removed."""
        recorder = self.context.recorder
        if recorder.rows is None or recorder.plan.kinds.isdisjoint(_SCALED_KINDS):
            return
        recorder.rows.drop(_SCALED_KINDS)
        self._rescaled += 1
        if self._rescaled == _LOGGED_RESCALED:
            log.warning(
                "another gradient scaler than in the step before calls the optimizer, again: such steps have no %s",
                " and no ".join(sorted(recorder.plan.kinds & _SCALED_KINDS)),
            )

    def _record_updates(self, parameters: Iterable[NamedParameter]) -> None:
        self.context.recorder.receive_differences(self._changes(parameters))

    def _changes(self, parameters: Iterable[NamedParameter]) -> Iterator[tuple[Site, Tensor, Tensor, str]]:
        """Yield site, weights after and before the step, and name; record the updates of distributed parameters."""
        sites = self._wanted_sites("weight_updates", "bias_updates") if self._before else {}
        for named in parameters:
            key = id(named.parameter)
            if (before := self._before.pop(key, None)) is None or (site := sites.get(key)) is None:
                continue
            if is_distributed(named.parameter) and has_numbers(after := local_tensor(named.parameter.detach())):
                wide = torch.promote_types(after.dtype, torch.float32)
                difference = distribute_like(after.to(wide) - before.to(wide), named.parameter)
                self.context.recorder.receive(site, difference, named.path)
            else:
                yield site, named.parameter, before, named.path

    def _record_states(self, optimizer: Optimizer, parameters: Iterable[NamedParameter]) -> None:
        for kind in self.context.recorder.plan.states:
            is_bias, field = kind.startswith("bias"), kind.split("_state_", 1)[1]
            for named in parameters:
                value = optimizer.state.get(named.parameter, {}).get(field) if named.is_bias == is_bias else None
                if isinstance(value, Tensor):
                    self.context.recorder.receive(self.context.sites(kind, named.module), value, named.path)

    def _memory(self, parameters: Iterable[NamedParameter]) -> dict[int, tuple[Tensor, Tensor]]:
        """Clone the weights of the host of which updates are wanted, and return those of devices with memory for copies."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        for _, named in self._wanted("weight_updates", "bias_updates", parameters):
            if not named.parameter.requires_grad:
                continue
            weights = local_tensor(named.parameter.detach())
            if (copy := _clone_or_memory(weights)) is None:
                self.skipped_updates += 1
                continue
            self._before[id(named.parameter)] = copy
            if not weights.is_cpu:
                copies[id(named.parameter)] = weights, copy
        return copies

    def _wanted(
        self, weights: str, biases: str, parameters: Iterable[NamedParameter]
    ) -> Iterator[tuple[Site, NamedParameter]]:
        """Yield the parameters of which a kind is wanted and was not recorded in this step."""
        recorded = self._recorded.setdefault(weights, set())
        wanted = self._wanted_sites(weights, biases)
        for named in parameters if wanted else ():
            key = id(named.parameter)
            if key not in recorded and (site := wanted.get(key)) is not None:
                recorded.add(key)
                yield site, named

    def _wanted_sites(self, weights: str, biases: str) -> dict[int, Site]:
        """Return the sites of the parameters of which a kind is wanted, by the parameter's id."""
        context = self.context
        plan, everything = context.recorder.plan, context.parameters.all
        of_plan = self._sites.setdefault(plan, {})
        known = of_plan.get(weights)
        if known is None or known[0] is not everything:
            sites = ((named, context.sites(biases if named.is_bias else weights, named.module)) for named in everything)
            found = {
                id(named.parameter): site for named, site in sites if plan.task(site.kind, site.module) is not None
            }
            known = of_plan[weights] = everything, found
        return known[1]


def _clone_or_memory(x: Tensor) -> Tensor | None:
    """Return a clone of a tensor of the host, and memory for a copy of a tensor of a device.

    ``None`` if it has no numbers, or there is no memory; training goes on.
    """
    try:
        if has_numbers(x):
            return x.clone() if x.is_cpu else torch.empty_like(x)
    except RuntimeError as error:
        raise_users_exception(error)
    return None
