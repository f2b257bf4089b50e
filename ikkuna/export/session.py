"""Keeps the step: what is recorded now, under which stamp, and how it reaches the bus."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.hooks.forward import ModelWatch
from ikkuna.export.hooks.hook import in_backward
from ikkuna.export.hooks.layer_gradients import BackwardWatch
from ikkuna.export.hooks.micro_gradients import GradientWatch
from ikkuna.export.hooks.optimizers import OptimizerWatch
from ikkuna.export.hooks.slots import SLOTS
from ikkuna.export.messages.message import NetworkMessage
from ikkuna.export.messages.stamp import Stamp
from ikkuna.export.model.parameters import TrackedParameters
from ikkuna.export.ranks.exchange import Exchange
from ikkuna.export.rows.delivery import Finished
from ikkuna.export.rows.plan import Demand, Plan
from ikkuna.export.rows.recorder import Recorder
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.step_tracker import TRAINING, Clock
from ikkuna.export.steps.stopwatch import Stopwatch

__all__ = ["Session"]


class Session:
    """Turns what the taps see into rows of steps.

    Parameters
    ----------
    bus : where rows and events go
    kernels : whether compiled kernels measure, where they are to be had
    in_graph : whether compiled models are looked at within their graphs

    Attributes
    ----------
    model, backward, gradients, optimizers : what hears the hooks of modules, of their outputs' gradients, of parameters' gradients,
        and of optimizers
    exchange : what makes one of the rows of all ranks
    steps : number of training steps seen
    """

    def __init__(self, bus: MessageBus, kernels: bool = True, in_graph: bool = True) -> None:
        self.bus = bus
        self.parameters = TrackedParameters()
        self.clock = Clock(self.parameters)
        self.clock.listen(self)
        self.recorder = Recorder(bus.error_guard, kernels)
        self.stopwatch = Stopwatch()
        self.model = ModelWatch(self, in_graph)
        self.backward = BackwardWatch(self)
        self.gradients = GradientWatch(self)
        self.optimizers = OptimizerWatch(self)
        self.exchange = Exchange(bus, self.place, lambda: self.model.taps.roots)
        self._blind = False
        self.steps = 0
        self._interrupted: Recorder | None = None
        self._demand = Demand()
        self._places: dict[tuple[str, str | None], Site] = {}
        self._epoch_announced = False
        self._thread = bus.error_guard.thread

    @property
    def blind(self) -> bool:
        """Whether nobody looks: by order, or because a subscriber's code runs."""
        return self._blind or self._thread.subscriber_is_running

    @blind.setter
    def blind(self, blind: bool) -> None:
        self._blind = blind

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Do not look for the time of a ``with`` block; afterwards it is as it was ordered before, whoever asked."""
        was, self._blind = self._blind, True
        try:
            yield
        finally:
            self._blind = was

    @property
    def skipped(self) -> int:
        """Tensors without numbers, and updates there was no memory for."""
        return self.optimizers.skipped_updates + self.recorder.unreadable

    def fault(self, where: str, error: Exception) -> None:
        """Take an error of our own."""
        self.bus.error_guard.report_internal(where, error)

    # -- what taps see --------------------------------------------------------------------------------------------

    def place(self, kind: str, module: str | None = None) -> Site:
        """Return the place of a kind and module, the same object every time."""
        try:
            return self._places[kind, module]
        except KeyError:
            return self._places.setdefault((kind, module), SLOTS.assign(self, kind, module))

    def take_traced(self, place: Site, tensor: Tensor, path: str, role: int) -> None:
        """Measure a tensor that an operator in a compiled graph saw."""
        self.stopwatch.start()
        try:
            self.model.taps.was_traced(place.module)
            if place.kind == "layer_gradients":
                self.model.forwards.backward_seen()
                self.backward.gradient_seen(place, path, None, tensor, role)
            elif not self.blind and self.clock.counting and not in_backward():
                self.model.traced_module_called()
                self.recorder.receive(place, tensor, path)
        except Exception as error:
            self.fault(f"looking at {place}", error)
        finally:
            self.stopwatch.stop()

    def entered(self, counts: bool) -> None:
        """Take the call of a compiled root."""
        self.stopwatch.start()
        try:
            self.model.compiled_root_entered(counts)
        except Exception as error:
            self.fault("a compiled root's call", error)
        finally:
            self.stopwatch.stop()

    def demand_changed(self) -> bool:
        """Take a change of what is wanted; say whether a compiled model has to be traced anew."""
        wishes = Plan(tuple(s for s in self.bus.registered if not s.disabled))
        return self.model.taps.prepare(wishes, self._next_plan())

    def _next_plan(self) -> Plan:
        return self._demand.plan(self.bus.registered, self.clock.stamp)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_opened(self, stamp: Stamp) -> None:
        """Begin to record a step."""
        if not self._epoch_announced:
            self._epoch_announced = True
            self.bus.post(NetworkMessage(stamp, "epoch_started"))
        if self.bus.is_wanted("batch_started"):
            self.bus.post(NetworkMessage(stamp, "batch_started"))
        self._record(stamp)
        plan = self.recorder.plan
        if plan.parameters or plan.micro_gradients or self.exchange.replicas > 1:
            self.parameters.refresh()
        self.gradients.step_opened()
        self.optimizers.step_opened()
        self._tap()

    def step_closed(self, stamp: Stamp, skipped: bool) -> None:
        """Hand what was recorded to the bus."""
        self.model.forwards.step_over()
        self.backward.step_over()
        self.gradients.step_closed()
        finished = NetworkMessage(stamp, "batch_finished", self._report())
        self.optimizers.step_closed()
        self.steps += not skipped
        self.model.warn_of_missing_loss()
        plan, rows = self.recorder.plan, self.recorder.close()
        if rows is not None:
            rows.skipped = rows.skipped or skipped
            self.exchange.take(rows, plan)
            self.bus.post(Finished(rows, finished))
        if self.model.taps.is_found_compiled():
            self.model.reconsider()
        next_plan = self._next_plan()
        self.model.taps.keep_for(next_plan)
        self.model.taps.turn(next_plan)
        if self.model.forwards.is_rootless:
            self.model.taps.install(next_plan)  # no root will tell that the next step begins
        self.bus.drain(wait=self.exchange.must_wait(stamp))
        self.stopwatch.step_over()
        if not skipped and self.clock.epoch_is_full:
            self.epoch_finished()

    def _report(self) -> dict[str, Any]:
        """Return what there is to tell of a step that is over."""
        report: dict[str, Any] = {"learning_rates": self.optimizers.rates}
        if (lap := self.stopwatch.lap()) is not None:
            report["seconds"], report["own_seconds"] = lap
        return report

    def _record(self, stamp: Stamp) -> None:
        self.exchange.step_opened()
        self.recorder.is_agreed = self.exchange.is_shared
        self.recorder.open(stamp, self._demand.plan(self.bus.registered, stamp))

    def _tap(self) -> None:
        plan = self.recorder.plan
        if not self.model.taps.is_compiled:
            self.model.taps.turn(plan)
            self.model.taps.install(plan)

    def epoch_finished(self) -> None:
        """Close what is pending, tell that the epoch is over, begin another."""
        self.clock.close_pending()
        if self.clock.train_step == 0 and not self._epoch_announced:
            return  # it was full, and is over already
        self.bus.post(NetworkMessage(self.clock.pass_stamp(TRAINING), "epoch_finished"))
        self.clock.next_epoch()
        self.model.resolve()
        self._epoch_announced = False
        self.bus.drain(wait=self.exchange.must_wait(None))

    # -- other passes ---------------------------------------------------------------------------------------------

    def begin_pass(self, name: str) -> None:
        """Record another pass over data under its own name, until `end_pass`; an open step waits."""
        if name == self.clock.pass_name:
            return
        self.end_pass()
        if name == TRAINING:
            return
        self.clock.close_pending()
        self._leave_pass()
        self.clock.pass_name = name
        self._interrupted, self.recorder = (
            self.recorder,
            Recorder(self.bus.error_guard, self.recorder.kernels is not None),
        )
        self._record(self.clock.pass_stamp(name))
        self._tap()
        self.model.taps.turn_for_pass(self.recorder.plan)

    def end_pass(self) -> None:
        """Hand what another pass saw to the bus, and go back to training."""
        if self._interrupted is None:
            return
        self._leave_pass()
        plan = self.recorder.plan
        if (rows := self.recorder.close()) is not None:
            self.exchange.take(rows, plan)
            self.bus.post(Finished(rows, None))
        self._interrupted.unreadable += self.recorder.unreadable
        self.recorder, self._interrupted = self._interrupted, None
        self.clock.pass_name = TRAINING
        if self.clock.is_open:
            self._tap()
        self.model.taps.turn(self.recorder.plan if self.clock.is_open else self._next_plan())
        self.bus.drain()

    def _leave_pass(self) -> None:
        self.model.forwards.step_over()
        self.backward.step_over()
        self.model.taps.remove()

    @contextmanager
    def in_pass(self, name: str) -> Iterator[None]:
        """Record what happens inside as a pass of that name, then go back to the pass there was."""
        before = self.clock.pass_name
        self.begin_pass(name)
        try:
            yield
        finally:
            self.begin_pass(before)

    def finish(self, for_good: bool = False) -> None:
        """Close whatever is open."""
        if for_good:
            self.exchange.prepare_close()
        self.end_pass()
        self.clock.close_pending()
        if for_good:
            self.clock.tell_of_missing_steps()
        self.model.forwards.step_over()
        self.backward.step_over()
        self.gradients.step_closed()
        self.model.taps.remove(everything=True)
        self.recorder.close()
