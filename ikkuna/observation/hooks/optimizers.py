"""Observes parameters around the steps of optimizers, which all exporters of the process share."""

from collections.abc import Callable, Iterable
from itertools import count, repeat
from operator import attrgetter, is_not
from threading import RLock
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ikkuna.diagnosis.mistakes import NO_GRADIENT, SCHEDULED_IN_VAIN
from ikkuna.metrics.messages.kinds import MICRO_KINDS, UNCLIPPED_KINDS
from ikkuna.observation.hooks.call_stack import creates_optimizer_state
from ikkuna.observation.hooks.context import HookContext, running_steps
from ikkuna.observation.hooks.first_steps import FirstSteps
from ikkuna.observation.hooks.hook import Hook, Remove
from ikkuna.observation.hooks.loss import LossHooks
from ikkuna.observation.hooks.parameter_table import ParameterTable
from ikkuna.observation.steps.step_tracker import State
from ikkuna.printable import listed
from ikkuna.store.finding import Finding
from ikkuna.support.failures import log
from ikkuna.support.modules import NamedParameter
from ikkuna.support.torch_internals import call_from_compiled, own_hooks


def add_rates(optimizer: Optimizer, rates: dict[str, Any]) -> None:
    """Store the learning rates in `rates` before a scheduler changes them; a rate on an accelerator stays there."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        name = str(group.get("name", len(rates)))
        rates[_unused(name, rates) if name in rates else name] = (
            rate.detach().clone() if isinstance(rate, Tensor) else rate
        )


_SETTINGS = {"eps": "epsilon", "weight_decay": "weight_decay", "initial_lr": "initial_rate", "maximize": "maximize"}


def settings_of(group: dict[str, Any]) -> dict[str, float]:
    """Return the betas, ``epsilon``, ``weight_decay``, ``maximize`` and ``initial_rate`` of a parameter group, if it has them.

    A scheduler of ``torch.optim`` stores the initial rate.

    ``weight_decay`` is 0, or that which shrinks weights by itself; that of ``torch.optim.Adam`` becomes a part of the gradient.

    Examples
    --------
    >>> import torch
    >>> weight = nn.Parameter(torch.ones(1))
    >>> settings_of(torch.optim.AdamW([weight]).param_groups[0])
    {'epsilon': 1e-08, 'weight_decay': 0.01, 'maximize': 0.0, 'beta1': 0.9, 'beta2': 0.999}
    >>> settings_of(torch.optim.Adam([weight], weight_decay=0.1).param_groups[0])
    {'epsilon': 1e-08, 'maximize': 0.0, 'beta1': 0.9, 'beta2': 0.999}
    """
    found = {name: group.get(key) for key, name in _SETTINGS.items()}
    if group.get("decoupled_weight_decay") is False and found["weight_decay"]:
        del found["weight_decay"]
    betas = group.get("betas")
    if isinstance(betas, tuple | list) and len(betas) == 2:
        found["beta1"], found["beta2"] = betas
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _unused(name: str, taken: Iterable[str]) -> str:
    """Return `name` with the first number behind it that makes it differ from those `taken`."""
    numbered = (f"{name}_{i}" for i in count(1))
    return next(free for free in numbered if free not in taken)


class CallsEach:
    """A global hook of torch that calls the hooks of all exporters.

    torch iterates over its dictionary of global hooks in each step, so a change of this dictionary raises in the step of another thread.
    Therefore one pair is registered at the first call and never removed; it reads an immutable tuple.
    """

    __slots__ = ("hooks",)

    def __init__(self) -> None:
        self.hooks: tuple[Hook, ...] = ()

    def __call__(self, *args: Any) -> None:
        """Call each hook."""
        for hook in self.hooks:
            hook(*args)

    def add(self, hook: Hook) -> None:
        """Call a hook from now on."""
        self._replace(lambda hooks: (*hooks, hook))

    def remove(self, hook: Hook) -> None:
        """Call a hook no more."""
        self._replace(lambda hooks: tuple(each for each in hooks if each is not hook))

    def _replace(self, change: Callable[[tuple[Hook, ...]], tuple[Hook, ...]]) -> None:
        with _lock:
            is_done = False
            while not is_done:  # a garbage collection while the tuple is made may remove the hooks of other exporters
                before = self.hooks
                after = change(before)
                if is_done := self.hooks is before:
                    self.hooks = after


call_from_compiled(CallsEach.__call__)

# process-wide, as torch's global hooks are
BEFORE_STEP, AFTER_STEP = CallsEach(), CallsEach()
_handles: tuple[RemovableHandle, ...] = ()
_lock = RLock()


def call_at_steps(begins: Hook, ends: Hook) -> Remove:
    """Call hooks before and after the step of any optimizer, until the returned function is called."""
    global _handles
    with _lock:
        if not _handles or any(handle.id not in (handle.hooks_dict_ref() or ()) for handle in _handles):
            for handle in _handles:
                handle.remove()
            _handles = (
                register_optimizer_step_pre_hook(BEFORE_STEP),
                register_optimizer_step_post_hook(AFTER_STEP),
            )
    BEFORE_STEP.add(begins)
    AFTER_STEP.add(ends)

    def remove() -> None:
        try:
            BEFORE_STEP.remove(begins)
        finally:
            AFTER_STEP.remove(ends)

    return remove


_GRADIENT = attrgetter("parameter.grad")
_SCALED_KINDS = frozenset(("layer_gradients", *MICRO_KINDS, *UNCLIPPED_KINDS))
_LOGGED_RESCALED = 3  # a training that begins, or is resumed, with a scaler changes it once


class OptimizerHooks:
    """Reports steps of optimizers to the tracker, and records what they read and write.

    Weights are recorded before the step, as the forward has used them.  Gradients are recorded as the optimizer receives them:
    accumulated, unscaled, clipped and reduced, behind the hooks that the optimizer itself has before its step; with a closure after the
    step, which has computed them.
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
    settings : dict
        What `settings_of` returns for each group with a rate, in a step that records parameters.
    gradients : int
        Number of parameters that had a gradient when their optimizer used them, in a step whose event says so.
    table : ParameterTable
        Records the tensors of parameters.
    untrained : UntrainedParameters
        Reports which trainable parameters are not trained.
    first_steps : FirstSteps, optional
        Compares gradients of the first steps, if rules are applied.
    """

    def __init__(self, context: HookContext, loss: LossHooks) -> None:
        self.context = context
        self._loss = loss
        self.rates: dict[str, Any] = {}
        self.settings: dict[str, dict[str, float]] = {}
        self.has_closure = False
        self.gradients = 0
        self.untrained = UntrainedParameters(lambda finding: context.found(finding))
        self.first_steps: FirstSteps | None = None
        self.table = ParameterTable(context)
        self._by_hand: bool | None = None  # not known before the first step
        self._rescaled = 0
        self._behind = Hook(self, OptimizerHooks.step_begins)
        self._used: set[int] = set()  # ids of the parameters whose gradients the step uses or no optimizer will

    # -- hooks ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of an optimizer's step, behind the hooks of the optimizer itself, which torch calls later."""
        if own := own_hooks(optimizer):
            own.pop(id(self), None)  # of a step that has raised
        if own:
            own[id(self)] = self._behind
        else:
            self.step_begins(optimizer, args, kwargs)

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the beginning of an optimizer's step, when its gradients are those that it will read."""
        context = self.context
        parameters, tracker = context.parameters, context.tracker
        owned = parameters.owned_ids(optimizer)
        if not owned or (_has_no_rate(optimizer) and creates_optimizer_state()):
            return
        closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        number = parameters.number(optimizer)
        running, scaler = running_steps()
        outer = [*map(parameters.number, running[1:])]
        used = self.first_steps if not (closure or outer) else None
        self.first_steps = self.first_steps if used is None else used.step_begins(number, parameters.of(optimizer))
        is_new = context.computation.is_new()
        decisions = tracker.optimizer_begins(number, owned, closure=closure, running=outer, computed=is_new)
        if decisions:
            context.apply(decisions)
        if not tracker.optimizers.is_stepping(number):
            return
        if (scaler is not None or context.loss_scale.is_used) and context.loss_scale.set_scaler(scaler):
            self._drop_scaled()
        if "batch_finished" in context.recorder.plan.kinds or context.observer is not None:
            self._add_groups(optimizer)
            self.has_closure = self.has_closure or closure
        owners = parameters.owners()
        unowned = owners.unowned
        if not closure and (unowned or self.untrained.settled is not parameters.all):
            self.untrained.note_gradients(parameters.all, parameters.unowned())
        if not context.recorder.plan.parameters:
            return
        observed = parameters.of(optimizer)
        self._note_used(owned, unowned)
        self.table.weights(observed if self.table.is_used else parameters.all, observed, bool(owners.shared))
        if not closure:
            self._count_gradients(observed)
            self.table.gradients(observed, getattr(optimizer, "grad_scale", None))
            if unowned:
                self.table.unowned_gradients()

    def optimizer_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle the end of an optimizer's step."""
        if own := own_hooks(optimizer):
            own.pop(id(self), None)
        context = self.context
        parameters, tracker = context.parameters, context.tracker
        number = parameters.number(optimizer)
        if not tracker.optimizers.is_stepping(number):
            if parameters.owned_ids(optimizer):
                context.apply(tracker.optimizer_ends(number))
            return
        owners = parameters.owners(optimizer)
        if (owners.unowned or self.untrained.settled is not parameters.all) and tracker.optimizers.in_closure:
            self.untrained.note_gradients(parameters.all, parameters.unowned())
        if self.first_steps is not None:
            self.first_steps.step_ended(number, parameters.of(optimizer), owners.shared)
        if context.recorder.plan.parameters:
            observed = parameters.of(optimizer)
            if tracker.optimizers.in_closure:
                self._count_gradients(observed)
                self.table.gradients(observed)
                self.table.unowned_gradients()
            shared = owners.shared
            self.table.updates([n for n in observed if id(n.parameter) not in shared] if shared else observed)
            if context.recorder.plan.states:
                self.table.states(optimizer, observed)
        self._loss.optimizer_ends(optimizer, number)
        if context.recorder.rows is not None and (found := getattr(optimizer, "found_inf", None)) is not None:
            context.recorder.rows.note_overflow(found)
        context.apply(tracker.optimizer_ends(number, owners.numbers, owners.covered))
        context.computation.step_ended()

    def step_by_hand(self) -> None:
        """Handle the end of a step that no optimizer makes."""
        context = self.context
        # a step that opens only now has no weights from before the change
        self._by_hand = context.tracker.state is not State.IDLE
        if self._by_hand:
            self.table.gradients(context.parameters.all)
            self.table.updates(context.parameters.all)
        context.apply(context.tracker.step_by_hand(context.computation.is_new()))
        context.computation.step_ended()
        self._by_hand = True

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_opened(self) -> None:
        """Record the weights now if no optimizer will report when they change."""
        parameters = self.context.parameters
        if self._by_hand is False:
            return
        if not (self._by_hand or not parameters.owners().numbers):
            return
        if not any(nn.parameter.is_lazy(named.parameter) for named in parameters.all):
            self.table.weights(parameters.all, parameters.all)

    def before_close(self) -> None:
        """Record the updates of parameters that several optimizers own, and forget gradients that the step has not used."""
        parameters = self.context.parameters.all
        self.table.updates(parameters)
        if self._used:
            self.table.drop_unclipped([named for named in parameters if id(named.parameter) not in self._used])
        if self.untrained.settled is None:
            self.untrained.step_ended()

    def step_ended(self) -> None:
        """Forget everything about the step."""
        if self.table.is_used or self.table.memory.buffers:
            self.table.step_ended()
        self.rates, self.settings = {}, {}
        self.context.parameters.gradients_kept = None
        self.has_closure = False
        self.gradients = 0
        self._used = set()

    def finish(self) -> None:
        """Report what holds for the whole training."""
        self.untrained.finish()
        self.first_steps = None
        if optimizers := self.context.parameters.scheduled_in_vain():
            detail = f"This concerns an optimizer of the class {type(optimizers[0]).__name__}."
            self.context.found(SCHEDULED_IN_VAIN.found(len(optimizers), detail=detail))

    # -- measurements ---------------------------------------------------------------------------------------------

    def _add_groups(self, optimizer: Optimizer) -> None:
        """Store the rates, and in a step that records parameters the other settings, of an optimizer's groups."""
        known = len(self.rates)
        add_rates(optimizer, self.rates)
        if self.context.recorder.plan.parameters:
            self.settings |= zip(list(self.rates)[known:], map(settings_of, optimizer.param_groups), strict=True)

    def _note_used(self, owned: Iterable[int], unowned: Iterable[NamedParameter]) -> None:
        """Remember which gradients count before they are clipped: those that the step uses, and those that no optimizer ever will."""
        if self.context.recorder.plan.unclipped_gradients:
            self._used.update(owned, (id(named.parameter) for named in unowned if named.parameter.requires_grad))

    def _count_gradients(self, observed: Iterable[NamedParameter]) -> None:
        if self.context.recorder.plan.reports_parameters:  # a loop in Python takes longer
            self.gradients += sum(map(is_not, map(_GRADIENT, observed), repeat(None)))

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


def _has_no_rate(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are known to be 0, without waiting for an accelerator."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if not isinstance(rate, int | float | Tensor) or (isinstance(rate, Tensor) and not rate.is_cpu) or rate:
            return False
    return True


_PATIENCE = 100  # steps in which a layer that is used now and then has time to be used
_FEW = 20  # a run that ends before that many steps says little about its layers


_UNUSED = "check whether their module is called, and its output used and not detached; freeze parameters that are not meant to be used"


class UntrainedParameters:
    """Logs which trainable parameters get gradients and belong to no optimizer, and finds those that never get a gradient.

    Attributes
    ----------
    found : callable
        Receives the finding of those that never get a gradient.
    names_unowned : bool
        Whether parameters that no optimizer owns are logged; ``False`` if a rule names them.
    settled : tuple of NamedParameter, optional
        The observed parameters if each of them has had a gradient; then nothing has to be noted for them.
    """

    def __init__(self, found: Callable[[Finding], object]) -> None:
        self.found = found
        self.names_unowned = True
        self.settled: tuple[NamedParameter, ...] | None = None
        self._all: tuple[NamedParameter, ...] = ()
        self._waiting: dict[int, NamedParameter] = {}  # trainable ones that had no gradient so far
        self._frozen: dict[int, NamedParameter] = {}
        self._unowned: set[int] = set()
        self._steps = 0

    def note_gradients(self, observed: tuple[NamedParameter, ...], unowned: Iterable[NamedParameter]) -> None:
        """Find out which parameters have gradients while an optimizer steps.

        Parameters
        ----------
        observed : tuple of NamedParameter
            All observed parameters.
        unowned : iterable of NamedParameter
            Those of them that no optimizer owns and that can be trained.
        """
        if observed is not self._all:
            self._track(observed)
        if self._waiting:
            self._waiting = {key: named for key, named in self._waiting.items() if named.parameter.grad is None}
        self.settled = None if self._waiting or self._frozen else observed
        found = {
            id(named.parameter): named
            for named in unowned
            if id(named.parameter) not in self._unowned and named.parameter.grad is not None
        }
        if found and self.names_unowned:
            self._unowned |= found.keys()
            log.warning(
                "no optimizer has these parameters, which get gradients: %s; they are not trained, and optimizer.zero_grad() does not "
                "clear their gradients, which add up; give them to an optimizer, or call requires_grad_(False)",
                _joined_names(found.values()),
            )

    def _track(self, observed: tuple[NamedParameter, ...]) -> None:
        known = {id(named.parameter) for named in self._all}
        ids = {id(named.parameter): named for named in observed}
        self._all = observed
        self._frozen = {key: named for key, named in ids.items() if key not in known or key in self._frozen}
        self._waiting = {key: named for key, named in ids.items() if key in self._waiting}
        self._unowned &= ids.keys()
        self._begin_window()

    def _begin_window(self) -> None:
        """Begin to wait for gradients of everything that can be trained now."""
        self._steps = 0
        everything = self._frozen | self._waiting
        self._waiting = {key: named for key, named in everything.items() if named.parameter.requires_grad}
        self._frozen = {key: named for key, named in everything.items() if key not in self._waiting}

    def step_ended(self) -> None:
        """Count a step, and report which parameters have had no gradient for many steps."""
        self._steps += 1
        if self._steps >= _PATIENCE:
            self._report_waiting()
            self._begin_window()

    def finish(self) -> None:
        """Report which parameters have had no gradient in the whole run."""
        if self._steps >= _FEW:
            self._report_waiting()

    def _report_waiting(self) -> None:
        """Report and forget the parameters that could be trained all the time and had no gradient."""
        found = {key: named for key, named in self._waiting.items() if named.parameter.requires_grad}
        self._waiting = {key: named for key, named in self._waiting.items() if key not in found}
        if found:
            modules = tuple(dict.fromkeys(named.module or named.name for named in found.values()))
            detail = f"This concerns, in {self._steps} steps, {_joined_names(found.values())}."
            finding = NO_GRADIENT.found(
                len(found), modules[0], detail=detail, advice=_UNUSED, at_most="info", modules=modules
            )
            self.found(finding)


def _joined_names(parameters: Iterable[NamedParameter]) -> str:
    """Return the names of a few parameters, and the number of the others."""
    return listed([f"{named.name} ({'bias' if named.is_bias else 'weight'})" for named in parameters], 5)
