"""Counts steps that no subscriber samples by four hooks, without the step tracker."""

import weakref
from collections.abc import Callable
from threading import RLock, get_ident
from time import perf_counter
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.backends.run import Run
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.observation.hooks.context import HookContext, running_steps
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.hook_set import HookSet
from ikkuna.observation.hooks.optimizers import OptimizerHooks
from ikkuna.observation.logged_values import LoggedValues
from ikkuna.observation.rows.plan import NOTHING, Plan
from ikkuna.observation.steps.step_tracker import StepTracker
from ikkuna.support.torch_internals import graph_task

__all__ = ["IdleSteps"]


_NOTHING, _CALLED, _RETURNED, _STEPPING = range(4)
"""The events of the open step so far."""

_MOST_REFUSALS = 64


class _Plans(Protocol):
    """The plans of steps."""

    def of_next_step(self) -> Plan:
        """Return the plan of the next step."""

    def count_idle(self) -> float:
        """Return for how many steps from the next one on neither they nor those after them can be sampled, or end an epoch."""


class _TrackerLater:
    """Stands for the step tracker while it does not know of all events; the use of any attribute tells it of them."""

    def __init__(self, idle: "IdleSteps", tracker: StepTracker) -> None:
        self._idle, self._tracker = idle, tracker

    def __getattr__(self, name: str) -> Any:
        self._idle.end()
        return getattr(self._tracker, name)


class IdleSteps:
    """Counts the steps before the next sampled one, while each is one call of the root and one step of the only optimizer.

    The step tracker gets no events of such steps.  Whatever uses the tracker ends this: the tracker gets the events of the open step first.
    So each other event, call of the user's, and change of what is wanted is handled as if the tracker had seen everything.

    Parameters
    ----------
    bus : MessageBus
        Its queue is empty during such steps.
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    logged : LoggedValues
        No values wait for their steps during such steps.

    Attributes
    ----------
    steps : int
        Number of steps that were counted here.
    """

    def __init__(self, bus: MessageBus, context: HookContext, hooks: HookSet, logged: LoggedValues) -> None:
        self._bus, self._context, self._hooks, self._logged = bus, context, hooks, logged
        self._tracker = context.tracker
        self._thread_state = context.error_guard.thread
        self._handlers: dict[Callable[..., object], Callable[..., bool]] = {
            ForwardHooks.root_begins: self._root_begins,
            ForwardHooks.root_ends: self._root_ends,
            OptimizerHooks.optimizer_begins: self._optimizer_begins,
            OptimizerHooks.optimizer_ends: self._optimizer_ends,
        }
        self._lock = RLock()  # another thread may use the tracker to log a value
        self._seen, self._left, self._thread = _NOTHING, 0.0, 0
        self._refusals = self._waits = 0
        self._plan = NOTHING
        self._run: Run | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._number, self._size, self._owned = 0, 0, frozenset[int]()
        self._owners: object = None
        self._lap: tuple[float, float] | None = None
        self.steps = 0

    # -- when -----------------------------------------------------------------------------------------------------

    def begin(self, plans: _Plans) -> None:
        """Count the next steps without the tracker, if the last step was one that can be counted so.

        After this was in vain, because each step has further events, it is done less and less often.
        """
        if self._waits:
            self._waits -= 1
        elif (left := plans.count_idle()) > 0 and self._find():
            context = self._context
            self._plan, self._left, self._run = plans.of_next_step(), left, self._bus.run
            self._thread, self._seen, self._lap = get_ident(), _NOTHING, None
            context.tracker = cast(StepTracker, _TrackerLater(self, self._tracker))
            context.idle_handlers = self._handlers

    def _find(self) -> bool:
        """Find the root and the only optimizer; return whether steps of them can be counted."""
        context, parameters = self._context, self._context.parameters
        if context.observer is not None or context.model.is_compiled or context.model.stages:
            return False
        if len(self._bus.queue) or self._logged.is_waiting or self._bus.is_wanted("batch_started"):
            return False
        if (number := self._tracker.only_optimizer) is None or not self._trains_all():
            return False
        self._owners, roots, optimizers = parameters.known_owners(), context.model.callable, parameters.optimizers()
        if len(roots) != 1 or len(optimizers) != 1 or self._owners.unowned:
            return False
        self._root, self._optimizer = weakref.ref(roots[0]), weakref.ref(optimizers[0])
        self._number, self._owned = number, parameters.owned_ids(optimizers[0])
        self._size = sum(len(group["params"]) for group in optimizers[0].param_groups)
        return parameters.number(optimizers[0]) == number

    def _trains_all(self) -> bool:
        """Whether it is known that each parameter gets gradients."""
        return self._hooks.optimizers.untrained.settled is self._context.parameters.all

    def end(self) -> None:
        """Let the tracker handle all events from now on, after those of the open step."""
        context = self._context
        with self._lock:
            if context.tracker is self._tracker:
                return
            context.tracker, context.idle_handlers = self._tracker, {}
            self._refusals = 0 if self._lap else min(2 * self._refusals + 1, _MOST_REFUSALS)
            self._waits = self._refusals
            try:
                self._report()
            except Exception as error:
                context.error_guard.report_internal("the events of a step that is not sampled", error)

    def _report(self) -> None:
        context, tracker = self._context, self._tracker
        seen, self._seen = self._seen, _NOTHING
        lap, self._lap = self._lap, None
        if lap is not None:
            context.stopwatch.steps_passed(*lap, 0.0 if self._run is None else self._run.drawing_seconds)
            self._logged.step_ends(tracker.counters.global_step - 1)
        if seen >= _CALLED:
            tracker.forward_begins(self._thread)
            context.recorder.open(tracker.stamp, self._plan)  # what is wanted may have changed since
            self._hooks.step_opened()
        if seen >= _RETURNED:
            tracker.forward_ends(self._thread)
        if seen >= _STEPPING:
            tracker.optimizer_begins(self._number, self._owned)

    # -- hooks: each returns whether the tracker needs no event; with few calls, because caches are cold ----------

    def _root_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context = perf_counter(), self._context
        with self._lock:
            if (
                context.tracker is self._tracker
                or self._seen != _NOTHING
                or self._root is None
                or self._root() is not module
                or not module.training
                or not torch.is_grad_enabled()
                or get_ident() != self._thread
                or graph_task() != -1
                or context._is_paused
                or context.is_interrupted
                or self._thread_state.subscriber_is_running
            ):
                return False
            self._seen = _CALLED
            context.stopwatch.spent += perf_counter() - began
            return True

    def _root_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        began, context = perf_counter(), self._context
        with self._lock:
            if (
                context.tracker is self._tracker
                or self._seen != _CALLED
                or self._root is None
                or self._root() is not module
                or get_ident() != self._thread
                or graph_task() != -1
                or context._is_paused
                or context.is_interrupted
                or self._thread_state.subscriber_is_running
            ):
                return False
            self._seen = _RETURNED
            context.stopwatch.spent += perf_counter() - began
            return True

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context = perf_counter(), self._context
        with self._lock:
            if (
                context.tracker is self._tracker
                or self._seen != _RETURNED
                or self._optimizer is None
                or self._optimizer() is not optimizer
                or len(args) > 1
                or kwargs
                or get_ident() != self._thread
                or context._is_paused
                or context.is_interrupted
                or self._thread_state.subscriber_is_running
                or context.parameters.known_owners() is not self._owners
                or not self._trains_all()
            ):
                return False
            size = 0
            for group in optimizer.param_groups:
                rate = group.get("lr", 1)
                if (not isinstance(rate, Tensor) or rate.is_cpu) and not rate:
                    return False  # perhaps only the state of the optimizer is created
                size += len(group["params"])
            running, scaler = running_steps()
            if size != self._size or len(running) != 1:
                return False
            if scaler is not None or context.loss_scale.is_used:
                context.loss_scale.set_scaler(scaler)
            self._seen = _STEPPING
            context.stopwatch.spent += perf_counter() - began
            return True

    def _optimizer_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context, run = perf_counter(), self._context, self._run
        with self._lock:
            if (
                context.tracker is self._tracker
                or self._seen != _STEPPING
                or self._optimizer is None
                or self._optimizer() is not optimizer
                or get_ident() != self._thread
                or context._is_paused
                or context.is_interrupted
                or self._thread_state.subscriber_is_running
                or len(self._bus.queue)
                or (run is not None and run.control.request is not None)
            ):
                return False
            step = self._tracker.counters.step_closed()  # before anything else, because an interrupt may come between
            self._seen = _NOTHING
            self.steps += 1
            self._left -= 1
            self._hooks.optimizers.table.step_ended()
            context.computation.step_ended()
            if run is not None:
                run.commit(step)
            now = perf_counter()
            context.stopwatch.spent += now - began
            self._lap = now, context.stopwatch.spent
            if self._left <= 0:
                self.end()
            return True
