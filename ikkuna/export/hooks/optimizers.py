"""Observes parameters around the steps of optimizers: weights, gradients, updates, optimizer states and learning rates."""

from typing import Any

from torch.optim import Optimizer

from ikkuna.export.hooks.call_stack import running_steps
from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.learning_rates import add_rates, has_no_rate
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.export.hooks.parameter_recorder import ParameterRecorder
from ikkuna.export.messages.kinds import UNCLIPPED_KINDS
from ikkuna.export.model.untrained import UntrainedParameters
from ikkuna.export.steps.step_tracker import State
from ikkuna.logger import log

__all__ = ["OptimizerHooks"]

_SCALED_KINDS = frozenset(("layer_gradients", *UNCLIPPED_KINDS))
_LOGGED_RESCALED = 3  # a training that begins, or is resumed, with a scaler changes it once


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
    has_closure : bool
        Whether an optimizer of the open step evaluates the model itself.
    records : ParameterRecorder
        Records the tensors of parameters.
    untrained : UntrainedParameters
        Logs which trainable parameters are not trained.
    """

    def __init__(self, context: HookContext, loss: LossHooks) -> None:
        self.context = context
        self._loss = loss
        self.rates: dict[str, Any] = {}
        self.has_closure = False
        self.untrained = UntrainedParameters()
        self.records = ParameterRecorder(context)
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
            self.has_closure = self.has_closure or closure
        unowned = parameters.known_owners().unowned
        if not closure and (unowned or self.untrained.settled is not parameters.all):
            self.untrained.note_gradients(parameters.all, unowned)
        if not context.recorder.plan.parameters:
            return
        observed = parameters.of(optimizer)
        owners = parameters.known_owners()
        self.records.weights(observed if self.records.is_used else parameters.all, observed, bool(owners.shared))
        if not closure:
            self.records.gradients(observed, getattr(optimizer, "grad_scale", None))
            if unowned:
                self.records.unowned_gradients()

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
                self.records.gradients(observed)
                self.records.unowned_gradients()
            shared = owners.shared
            self.records.updates([n for n in observed if id(n.parameter) not in shared] if shared else observed)
            self.records.states(optimizer, observed)
        self._loss.optimizer_ends(number, parameters.owned_ids(optimizer))
        if context.recorder.rows is not None:
            context.recorder.rows.note_overflow(getattr(optimizer, "found_inf", None))
        context.apply(tracker.optimizer_ends(number, owners.numbers, owners.covered))

    def step_by_hand(self) -> None:
        """Handle the end of a step that no optimizer makes; weights and updates are recorded from the second one on."""
        context = self.context
        if context.tracker.state is not State.IDLE:
            self.records.gradients(context.parameters.all)
            self.records.updates(context.parameters.all)
        self._by_hand = True
        context.apply(context.tracker.step_by_hand())

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_opened(self) -> None:
        """Record the weights now if no optimizer will report when they change."""
        if self._by_hand and self.context.recorder.plan.parameters:
            self.records.weights(self.context.parameters.all, self.context.parameters.all)

    def before_close(self) -> None:
        """Record the updates of parameters that several optimizers own."""
        if self.records.is_used:
            self.records.updates(self.context.parameters.all)
        if self.untrained.settled is None:
            self.untrained.step_ended()

    def step_ended(self) -> None:
        """Forget everything about the step."""
        if self.records.is_used:
            self.records.forget()
        self.rates = {}
        self.has_closure = False

    # -- measurements ---------------------------------------------------------------------------------------------

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
