"""Counts steps of which nothing but the loss is wanted by a few hooks, without the step tracker."""

import weakref
from collections.abc import Callable, Sequence
from threading import RLock, get_ident
from time import perf_counter, perf_counter_ns
from typing import Any, Protocol, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.optim import Optimizer

from ikkuna.backends.run import Run
from ikkuna.metrics.bus.bus import MessageBus
from ikkuna.metrics.bus.delivery import Losses
from ikkuna.metrics.messages.batch import StepLosses
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.numerics.statistics.native.hook_functions import MOST_LOSSES
from ikkuna.observation.hooks.call_stack import SEES_BACKWARD
from ikkuna.observation.hooks.context import HookContext, running_steps
from ikkuna.observation.hooks.forward import ForwardHooks
from ikkuna.observation.hooks.gradients import GradientNorm
from ikkuna.observation.hooks.hook import is_traced
from ikkuna.observation.hooks.hook_set import HookSet
from ikkuna.observation.hooks.loss import LossHooks, is_one_number, needs_outputs
from ikkuna.observation.hooks.loss_owner import is_computed_in
from ikkuna.observation.hooks.optimizers import OptimizerHooks, add_rates
from ikkuna.observation.logged_values import LoggedValues
from ikkuna.observation.rows.plan import NOTHING, Plan
from ikkuna.observation.steps.forwards import Forward
from ikkuna.observation.steps.step_tracker import StepTracker
from ikkuna.store.run_directory import ControlFile
from ikkuna.support.torch_internals import graph_task, memory_of, own_hooks, sequence_number

_OFF, _NOTHING, _CALLED, _RETURNED, _COMPUTING, _STEPPING = range(-1, 5)
"""The events of the open step so far; a step of which nothing is wanted has no `_COMPUTING`.  `_OFF` while steps are not counted here."""

_NO_ARGUMENTS: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
_MOST_REFUSALS = 64


class _Plans(Protocol):
    """The plans of steps."""

    def of_next_step(self) -> Plan:
        """Return the plan of the next step."""

    def measure(self, stamp: Stamp) -> Plan:
        """Let each subscriber that needs no forward sample a step; return its plan."""

    def count_idle(self) -> float:
        """Return how many steps from the next one on need no more than the loss, and do not end an epoch."""


class _TrackerLater:
    """Stands for the step tracker while it does not know of all events; the use of any attribute tells it of them."""

    def __init__(self, idle: "IdleSteps", tracker: StepTracker) -> None:
        self._idle, self._tracker = idle, tracker

    def __getattr__(self, name: str) -> Any:
        self._idle.end()
        return getattr(self._tracker, name)


_LossCall = tuple[nn.Module, Tensor, "weakref.ref[Tensor]"]
"""One call of the loss module: module, labels and result.  Where the backward begins at another number, such as the result with a penalty,
the call becomes a part of the objective of the step, beside that number."""


class IdleSteps:
    """Counts the steps between sampled ones, while each is one call, one backward, and one step of the only optimizer.

    The step tracker gets no events of such steps.  Whatever uses the tracker ends this: the tracker gets the events of the open step first.
    So each other event, call of the user's, and change of what is wanted is handled as if the tracker had seen everything.

    If subscribers take the loss of every step (see `Subscriber.compute_losses`), it is read where the loss module returns it, or else where
    its backward begins, on the host alone.  The losses are delivered together, `MOST_LOSSES` at most.
    A step whose loss is above the threshold of a subscriber is measured itself: it is sampled by each subscriber that needs no forward,
    from its backward on.  So is a step whose gradients have a norm above a threshold, or NaN, from its optimizer on; they are read as
    often as `GradientNorm` permits.

    Parameters
    ----------
    bus : MessageBus
        Its queue is empty during such steps.
    context : HookContext
    hooks : HookSet
        The hooks of the exporter.
    logged : LoggedValues
        No values wait for their steps during such steps.
    is_shared : callable
        Returns whether measurements are merged with those of other ranks.
    counting_ended : callable
        Called after the last step that is counted.
    """

    # Native functions handle the usual events where there are some; the methods below define what they do with these slots, and with
    # `CountedSteps`.
    __slots__ = (
        *("__weakref__", "_arguments", "_bus", "_call", "_computing", "_context", "_control", "_counted"),
        *("_counting_ended", "_gradients", "_handlers", "_has_counted", "_hooks", "_is_shared", "_left", "_lock"),
        *("_logged", "_loss_arguments", "_losses", "_number", "_objective", "_on_host", "_optimizer", "_output"),
        *("_owned", "_plan", "_plans", "_queue", "_rates", "_refusals", "_root", "_run", "_steps", "_stop_looking"),
        *("_thread", "_thread_state", "_tracker", "_waits"),
    )

    def __init__(
        self,
        bus: MessageBus,
        context: HookContext,
        hooks: HookSet,
        logged: LoggedValues,
        is_shared: Callable[[], bool],
        counting_ended: Callable[[], object],
    ) -> None:
        self._bus, self._context, self._hooks, self._logged = bus, context, hooks, logged
        self._queue, self._counted = bus.queue, context.native.counted
        self._is_shared, self._counting_ended = is_shared, counting_ended
        self._tracker = context.tracker
        self._thread_state = context.error_guard.thread
        self._handlers: dict[Callable[..., object], Callable[..., bool]] = {
            ForwardHooks.root_begins: self._root_begins,
            ForwardHooks.root_ends: self._root_ends,
            LossHooks.loss_called: self._loss_called,
            LossHooks.backward_starts: self._backward_starts,
            OptimizerHooks.optimizer_begins: self._optimizer_begins,
            OptimizerHooks.optimizer_ends: self._optimizer_ends,
        }
        context.native_handlers = dict(zip(self._handlers, context.native.event_handlers(self), strict=False))
        self._lock = RLock()  # another thread may use the tracker to log a value
        self._counted.seen, self._left, self._thread = _OFF, 0.0, 0
        self._computing = _RETURNED  # what an optimizer's step follows
        self._refusals = self._waits = 0
        self._plan, self._plans = NOTHING, cast(_Plans, None)
        self._run: Run | None = None
        self._root: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._control: ControlFile | None = None
        self._number, self._owned, self._has_counted = 0, frozenset[int](), False
        # losses
        self._stop_looking: Callable[[], object] = int
        self._output: weakref.ref[Tensor] | None = None
        self._call: _LossCall | None = None
        self._objective: tuple[_LossCall, float] | None = None
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = _NO_ARGUMENTS
        self._loss_arguments: tuple[Any, ...] = ()
        self._losses, self._rates = StepLosses(), list[list[Any]]()
        self._on_host: tuple[object, bool] = (), True
        self._steps = 0
        self._gradients = GradientNorm(context.parameters)

    @property
    def steps(self) -> int:
        """Number of steps that were counted here."""
        return self._steps + self._counted.count

    # -- when -----------------------------------------------------------------------------------------------------

    def begin(self, plans: _Plans) -> None:
        """Count the next steps without the tracker, if the last step was one that can be counted so.

        After this was in vain, because each step has further events, it is done less and less often.
        """
        if self._waits:
            self._waits -= 1
        elif (left := plans.count_idle()) > 0 and self._find(plan := plans.of_next_step()):
            context, counted = self._context, self._counted
            self._plan, self._plans, self._left, self._run = plan, plans, left, self._bus.run
            self._control = None if self._run is None else self._run.control
            self._thread, self._has_counted = get_ident(), False
            counted.seen, counted.is_observed = _NOTHING, context.observer is not None
            self._computing = _COMPUTING if counted.takes_losses else _RETURNED
            if counted.takes_losses:
                self._begin_losses()
            context.tracker = cast(StepTracker, _TrackerLater(self, self._tracker))
            context.idle_handlers = self._handlers
            counted.thread = self._thread if self._is_on_host() else 0  # on a device a CUDA graph may be captured

    def _begin_losses(self) -> None:
        subscribers = [registered.subscriber for registered in self._plan.subscriptions]
        counted = self._counted
        counted.threshold = min(subscriber.loss_threshold() for subscriber in subscribers)
        rates: dict[str, Any] = {}
        if self._optimizer is not None and (optimizer := self._optimizer()) is not None:
            add_rates(optimizer, rates)
        self._steps, counted.count, counted.most = self.steps, 0, int(min(self._left, MOST_LOSSES))
        self._losses, self._rates = StepLosses(self._tracker.stamp, tuple(rates), perf_counter()), []
        self._begin_gradients([limit for each in subscribers if (limit := each.gradient_threshold()) is not None])
        self._stop_looking = self._hooks.losses.look()

    def _begin_gradients(self, thresholds: Sequence[float]) -> None:
        """Set the first step whose gradients are read, if any subscriber wants them."""
        self._counted.gradients_at = -1
        if thresholds:
            self._gradients.threshold = min(thresholds)
            self._counted.gradients_at = self._gradients.expect(self._tracker.stamp.global_step)

    def _has_usual_gradients(self) -> bool:
        """Read the gradients of the open step if that is due; return whether their norm is usual, as far as it is known."""
        counted, losses, norm = self._counted, self._losses, self._gradients
        if (count := counted.count) != counted.gradients_at:
            return True
        first = self._tracker.stamp.global_step
        value = norm.read(first + count, (perf_counter() - losses.began) / (count + 1))
        counted.gradients_at = norm.due - first
        if value is not None:
            losses.gradients[count] = value
        return value is None or value <= norm.threshold

    def _find(self, plan: Plan) -> bool:
        """Find the root and the only optimizer; return whether steps of them can be counted."""
        context, parameters = self._context, self._context.parameters
        takes_losses = self._counted.takes_losses = bool(plan.subscriptions)
        if (context.observer is not None and context.observer.needs_every_step) or context.model.is_compiled:
            return False
        if takes_losses and not self._finds_loss():
            return False
        if context.model.stages or len(self._queue) or self._logged.is_waiting:
            return False
        if "batch_started" in self._bus.by_kind:
            return False
        if (number := self._tracker.only_optimizer) is None or not self._trains_all():
            return False
        roots, optimizers = context.model.callable, parameters.optimizers()
        if len(roots) != 1 or len(optimizers) != 1 or parameters.owners().unowned:
            return False
        self._root, self._optimizer = weakref.ref(roots[0]), weakref.ref(optimizers[0])
        self._number, self._owned = number, parameters.owned_ids(optimizers[0])
        self._counted.size = sum(len(group["params"]) for group in optimizers[0].param_groups)
        # hooks of the optimizer itself may change what it reads
        return parameters.number(optimizers[0]) == number and not own_hooks(optimizers[0])

    def _finds_loss(self) -> bool:
        """Whether the loss of the next step is known on the host, as far as this is known."""
        context, losses = self._context, self._hooks.losses
        module = context.model.loss
        is_usual = not (
            context.loss_scale.is_used or self._is_shared() or (module is not None and needs_outputs(module))
        )
        return is_usual and SEES_BACKWARD and losses.has_loss and self._is_on_host()

    def _is_on_host(self) -> bool:
        """Whether all parameters are."""
        parameters = self._context.parameters.all
        if self._on_host[0] is not parameters:
            self._on_host = parameters, all(named.parameter.is_cpu for named in parameters)
        return self._on_host[1]

    def _trains_all(self) -> bool:
        """Whether it is known that each parameter gets gradients."""
        return self._hooks.optimizers.untrained.settled is self._context.parameters.all

    def end(self) -> None:
        """Let the tracker handle all events from now on, after those of the open step."""
        context = self._context
        with self._lock:
            if context.tracker is self._tracker:
                return
            context.tracker, context.idle_handlers, self._counted.thread = self._tracker, {}, 0
            self._stop_looking()
            self._has_counted = self._has_counted or bool(self._counted.takes_losses and self._counted.count)
            self._refusals = 0 if self._has_counted else min(2 * self._refusals + 1, _MOST_REFUSALS)
            self._waits = self._refusals
            try:
                self._report()
            except Exception as error:
                context.error_guard.report_internal("the events of a step that is not sampled", error)

    def _report(self) -> None:
        context, tracker, observer, counted = self._context, self._tracker, self._context.observer, self._counted
        seen, counted.seen = counted.seen, _OFF
        if self._has_counted:
            self._report_counted()
        if seen >= _COMPUTING and graph_task() == -1:  # its backward has ended
            context.parameters.note_gradients(is_later=True)
        else:
            context.parameters.forget_gradients()
        if seen >= _CALLED:
            tracker.forward_begins(self._thread)
            context.recorder.open(tracker.stamp, self._plan)  # what is wanted may have changed since
            if observer is not None:
                # the states of random generators, which a plan would read, are not those of its beginning
                observer.step_opened(tracker.stamp, NOTHING)
                observer.model_called(*self._arguments)
                if self._loss_arguments:
                    observer.loss_called(self._loss_arguments, {})
            self._hooks.step_opened()
        if seen >= _RETURNED and (forward := tracker.forward_ends(self._thread)) is not None and counted.takes_losses:
            self._repeat(forward, seen)
        if seen >= _STEPPING:
            tracker.optimizer_begins(self._number, self._owned)
            if counted.takes_losses and self._optimizer is not None and (optimizer := self._optimizer()) is not None:
                add_rates(optimizer, self._hooks.optimizers.rates)
        self._forget()

    def _measure(self) -> None:
        """Let the open step be sampled from now on, and the tracker have its events."""
        self._close_counted()
        self._plan = self._plans.measure(self._tracker.stamp)
        self.end()

    def _close_counted(self) -> None:
        """Let the counters have the number of the next step; it may be called twice."""
        if self._counted.takes_losses and self._losses.first is not None:
            self._tracker.counters.steps_closed(self._losses.first, self._counted.count)

    def _report_counted(self) -> None:
        """Report the steps that were counted."""
        context, counters, observer = self._context, self._tracker.counters, self._context.observer
        counted, losses = self._counted, self._losses
        self._close_counted()
        context.computation.step_has_ended(self._thread, counted.nodes_at_end)
        ended = counted.ends[max(counted.count, 1) - 1]  # without losses only the last end is kept
        context.stopwatch.steps_passed(ended, (counted.nanoseconds - counted.nanoseconds_at_end) * 1e-9)
        if counted.takes_losses:
            losses.losses, losses.ends = counted.losses[: counted.count], counted.ends[: counted.count]
            losses.rates = self._rates
            self._steps, counted.count = self.steps, 0
            self._hooks.optimizers.table.step_ended(len(losses.losses))
        self._logged.step_ends(counters.next.global_step - 1)
        if counted.takes_losses:
            self._bus.queue.append(Losses(losses, self._plan.subscriptions))
            if observer is not None:
                observer.steps_passed(losses)
        elif observer is not None:
            observer.step_passed(counters.stamp(back=1))

    def _forget(self) -> None:
        """Forget the arguments of the open step."""
        self._arguments, self._loss_arguments, self._call, self._output = _NO_ARGUMENTS, (), None, None
        self._objective = None

    def _repeat(self, forward: Forward, seen: int) -> None:
        """Record the loss of the open step as hooks would have done that."""
        context, losses, call, counted = self._context, self._hooks.losses, self._call, self._counted
        known = None if self._output is None else self._output()
        outputs = [] if known is None else [("", known)]
        losses.expect_backward(forward, self._thread, range(counted.nodes, counted.behind), outputs)
        value = torch.tensor(counted.loss, dtype=torch.float64, device="cpu")
        if seen == _RETURNED:
            if call is not None:
                losses.repeat_call(*call, value, forward)
            return
        context.apply(self._tracker.backward_reached(forward))
        if call is None and context.model.loss is not None and self._objective is not None:
            call, objective = self._objective
            losses.repeat_call(*call, value, forward)
            losses.repeat_backward(torch.tensor(objective, dtype=torch.float64, device="cpu"), forward)
        elif call is None:
            losses.repeat_backward(value, forward)
        else:
            losses.repeat_call(*call, value, forward)

    # -- hooks: each returns whether the tracker needs no event; with few calls and attributes, because caches are cold ---
    # What an event checks, the events after it need not: who suspends recording uses the tracker, a subscriber's code runs between
    # steps, and a call of the root inside another one, in a backward or on another thread is an event that ends this.

    def _root_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context, counted = perf_counter_ns(), self._context, self._counted
        with self._lock:
            if counted.seen == _CALLED:
                self.end()
            if (
                counted.seen != _NOTHING
                or self._root is None
                or self._root() is not module
                or not module.training
                or not is_grad_enabled()
                or get_ident() != self._thread
                or graph_task() != -1
                or is_traced()
                or context.is_interrupted
                or self._thread_state.subscriber_is_running
            ):
                return False
            counted.seen, counted.nodes = _CALLED, sequence_number()
            if counted.is_observed:
                self._arguments = args, kwargs
            counted.nanoseconds += perf_counter_ns() - began
            return True

    def _root_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        began, counted = perf_counter_ns(), self._counted
        with self._lock:
            if counted.seen != _CALLED:
                return False
            counted.seen, counted.behind = _RETURNED, sequence_number()
            if type(output) is Tensor:
                self._output = weakref.ref(output)
            counted.nanoseconds += perf_counter_ns() - began
            return True

    def _loss_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        began, counted = perf_counter_ns(), self._counted
        with self._lock:
            if is_traced():
                return True
            is_usual = counted.seen == _RETURNED and get_ident() == self._thread and graph_task() == -1
            if not is_usual or (counted.takes_losses and not self._takes_call(module, args, kwargs, output)):
                self.end()
                return False
            counted.nanoseconds += perf_counter_ns() - began
            return True

    def _takes_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """Keep what is needed of the first call of the loss module; return whether that is enough to record it later.

        The loss of another model is left out.
        """
        if not isinstance(output, Tensor):
            return False
        counted = self._counted
        known = None if self._output is None else self._output()
        if known is None or not args or known is not args[0]:
            recorded = range(counted.nodes, counted.behind)
            if not is_computed_in([output], recorded):
                outputs = [] if known is None or (memory := memory_of(known)) is None else [memory]
                return self._hooks.losses.owner.is_another_in_step(
                    output, (*args, *kwargs.values()), [recorded], outputs
                )
        if self._call is not None or kwargs or len(args) != 2 or not is_one_number(output):
            return False
        if not isinstance(args[1], Tensor):
            return False
        counted.loss = output.item()  # the user may change the result in place, or keep no reference to it
        self._call = module, args[1], weakref.ref(output)
        if counted.is_observed:
            self._loss_arguments = args
        return True

    def _backward_starts(self, roots: Sequence[Any], gradients: Sequence[Any], accumulates: bool) -> bool:
        began, context, counted = perf_counter_ns(), self._context, self._counted
        with self._lock:
            if counted.seen == _OFF:
                return False
            if counted.seen == _NOTHING or is_traced():  # it belongs to no step
                return True
            call, is_own, is_here = self._call, None, counted.seen >= _RETURNED and get_ident() == self._thread
            is_of_call = call is not None and len(roots) == 1 and call[2]() is roots[0]
            if is_here:
                is_own = is_of_call or is_computed_in(roots, range(counted.nodes, counted.behind))
            if is_own is False:
                return True  # another model's
            if (
                not is_own
                or counted.seen != _RETURNED
                or not accumulates
                or len(roots) != 1
                or not is_one_number(root := roots[0])
                or gradients[0] is None  # its backward will raise
                or gradients[0].item() != 1
                or (call is None and context.model.loss is not None)
            ):
                self.end()
                return False
            if call is None:
                counted.loss = root.item()
            if not counted.loss <= counted.threshold:
                self._measure()
                return False
            if call is not None and not is_of_call:
                self._objective, self._call = (call, objective := root.item()), None
                if objective != counted.loss:
                    self._losses.objectives[counted.count] = objective
            counted.seen, self._loss_arguments = _COMPUTING, ()  # which no longer hold the graph
            counted.nanoseconds += perf_counter_ns() - began
            return True

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context, counted = perf_counter_ns(), self._context, self._counted
        with self._lock:
            if (
                counted.seen != self._computing
                or self._optimizer is None
                or self._optimizer() is not optimizer
                or len(args) > 1
                or kwargs
                or graph_task() != -1
                or get_ident() != self._thread
            ):
                return False
            size, is_plain, rates = 0, True, []
            for group in optimizer.param_groups:
                rate = group.get("lr", 1)
                if (not isinstance(rate, Tensor) or rate.is_cpu) and not rate:
                    return False  # perhaps only the state of the optimizer is created
                size += len(group["params"])
                rates.append(group.get("lr"))
                is_plain = is_plain and not isinstance(rate, Tensor)
            if size != counted.size or (counted.takes_losses and not is_plain):
                return False
            if self._call is None:  # else the backward began at what the loss module has returned, without a factor
                running, scaler = running_steps()
                if len(running) != 1 or (counted.takes_losses and scaler is not None):
                    return False
                if scaler is not None or context.loss_scale.is_used:
                    context.loss_scale.set_scaler(scaler)
            if counted.takes_losses:
                if not self._has_usual_gradients():
                    self._measure()
                    return False
                self._rates.append(rates)
            counted.seen = _STEPPING
            counted.nanoseconds += perf_counter_ns() - began
            return True

    def _optimizer_ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        began, context, counted, control = perf_counter_ns(), self._context, self._counted, self._control
        with self._lock:
            if counted.seen == _OFF:
                return False
            if self._optimizer is None or self._optimizer() is not optimizer:
                return not context.parameters.owned_ids(optimizer)  # another model's step changes nothing
            if (
                counted.seen != _STEPPING
                or get_ident() != self._thread
                or len(self._queue)
                or (control is not None and control.request is not None)
            ):
                return False
            count = counted.count
            counted.nanoseconds += perf_counter_ns() - began
            counted.nodes_at_end, counted.nanoseconds_at_end = sequence_number(), counted.nanoseconds
            counted.ends[count] = perf_counter()
            if counted.takes_losses:
                counted.losses[count] = counted.loss
                counted.count = count + 1  # this counts the step; an interrupt may come between two lines
                counted.seen = _NOTHING
                self._call, self._objective, self._output, self._arguments = None, None, None, _NO_ARGUMENTS
                is_over = counted.count >= counted.most
            else:
                step = self._tracker.counters.step_closed()
                counted.seen = _NOTHING
                self._steps, self._has_counted = self._steps + 1, True
                self._left -= 1
                self._hooks.optimizers.table.step_ended()
                if self._run is not None:  # losses are committed when they are delivered
                    self._run.commit(step)
                is_over = self._left <= 0
            if is_over:
                self.end()
        if is_over:
            self._counting_ended()
        return True
