"""Keeps the step: what is recorded now, under which stamp, and how it reaches the bus."""

import torch
from torch import Tensor

from ikkuna.export.clock import TRAINING, Clock
from ikkuna.export.demand import Demand
from ikkuna.export.messages.bus import Finished, MessageBus
from ikkuna.export.messages.message import NetworkMessage, Stamp
from ikkuna.export.model_watch import ModelWatch
from ikkuna.export.optimizer_watch import OptimizerWatch
from ikkuna.export.parameters import TrackedParameters
from ikkuna.export.recorder import Place, Recorder
from ikkuna.export.taps import SLOTS

__all__ = ["Observer"]


class Observer:
    """Turns what the taps see into rows of steps.

    Parameters
    ----------
    bus : where rows and events go

    Attributes
    ----------
    model, optimizers : what hears the hooks of modules, and those of optimizers
    blind : whether to look away
    steps : number of training steps seen
    """

    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus
        self.parameters = TrackedParameters()
        self.clock = Clock(self.parameters)
        self.clock.listen(self)
        self.recorder = Recorder(bus.faults)
        self.model = ModelWatch(self)
        self.optimizers = OptimizerWatch(self)
        self.blind = False
        self.steps = 0
        self._interrupted: Recorder | None = None
        self._demand = Demand()
        self._places: dict[tuple[str, str | None], Place] = {}
        self._slots: dict[Place, int] = {}
        self._epoch_announced = False
        self._backward = (-1, True)

    @property
    def skipped(self) -> int:
        """Tensors without numbers, and updates there was no memory for."""
        return self.optimizers.skipped_updates + self.recorder.unreadable

    def fault(self, where: str, error: Exception) -> None:
        """Take an error of our own."""
        self.bus.faults.own(where, error)

    # -- what taps see --------------------------------------------------------------------------------------------

    def place(self, kind: str, module: str | None = None) -> Place:
        """Return the place of a kind and module, the same object every time."""
        try:
            return self._places[kind, module]
        except KeyError:
            return self._places.setdefault((kind, module), Place(kind, module))

    def slot(self, kind: str, module: str | None = None) -> int:
        """Return the slot of a kind and module."""
        place = self.place(kind, module)
        if place not in self._slots:
            self._slots[place] = SLOTS.assign(self, place)
        return self._slots[place]

    def receive(self, place: Place, tensor: Tensor, path: str) -> None:
        """Measure a tensor that a tap saw; called through `observe`."""
        if self.blind or (place.kind == "layer_gradients" and not self._backward_counts()):
            return
        try:
            self.recorder.receive(place, tensor, path)
        except Exception as error:
            self.fault(f"measuring {place.kind} of {place.module}", error)

    def _backward_counts(self) -> bool:
        """Whether the running backward reaches a parameter: a gradient penalty's or an attack's first half does not."""
        task = torch._C._current_graph_task_id()
        if self._backward[0] != task:
            self._backward = task, self.parameters.any_reached_by_backward()
        return self._backward[1]

    # -- steps ----------------------------------------------------------------------------------------------------

    def step_opened(self, stamp: Stamp) -> None:
        """Begin to record a step."""
        if not self._epoch_announced:
            self._epoch_announced = True
            self.bus.post(NetworkMessage(stamp, "epoch_started"))
        self.bus.post(NetworkMessage(stamp, "batch_started"))
        self.recorder.open(stamp, self._demand.plan(self.bus.subscriptions, stamp))
        if self.recorder.plan.parameters:
            self.parameters.refresh()
        self.optimizers.step_opened()
        self.model.tap()

    def step_closed(self, stamp: Stamp, skipped: bool) -> None:
        """Hand what was recorded to the bus."""
        self.model.untap()
        finished = NetworkMessage(stamp, "batch_finished", {"learning_rates": self.optimizers.rates})
        self.optimizers.step_closed()
        self.steps += not skipped
        self.model.warn_of_missing_loss()
        rows = self.recorder.close()
        if rows is not None:
            rows.skipped = rows.skipped or skipped
            self.bus.post(Finished(rows, self.recorder.remember, finished))
        if self.model.is_rootless:
            self.model.tap_ahead(self._demand.plan(self.bus.subscriptions, self.clock.stamp))
        self.bus.drain()
        if not skipped and self.clock.epoch_is_full:
            self.epoch_finished()

    def epoch_finished(self) -> None:
        """Close what is pending, tell that the epoch is over, begin another."""
        self.clock.close_pending()
        if self.clock.train_step == 0 and not self._epoch_announced:
            return  # it was full, and is over already
        self.bus.post(NetworkMessage(self.clock.pass_stamp(TRAINING), "epoch_finished"))
        self.clock.next_epoch()
        self.model.resolve()
        self._epoch_announced = False
        self.bus.drain()

    # -- other passes ---------------------------------------------------------------------------------------------

    def begin_pass(self, name: str) -> None:
        """Record another pass over data under its own name, until `end_pass`; an open step waits."""
        if name == self.clock.pass_name:
            return
        self.end_pass()
        if name == TRAINING:
            return
        self.clock.close_pending()
        self.model.untap()
        self.clock.pass_name = name
        self._interrupted, self.recorder = self.recorder, Recorder(self.bus.faults)
        stamp = self.clock.pass_stamp(name)
        self.recorder.open(stamp, self._demand.plan(self.bus.subscriptions, stamp))
        self.model.tap()

    def end_pass(self) -> None:
        """Hand what another pass saw to the bus, and go back to training."""
        if self._interrupted is None:
            return
        self.model.untap()
        if (rows := self.recorder.close()) is not None:
            self.bus.post(Finished(rows, self.recorder.remember, None))
        self._interrupted.unreadable += self.recorder.unreadable
        self.recorder, self._interrupted = self._interrupted, None
        self.clock.pass_name = TRAINING
        if self.clock.is_open:
            self.model.tap()
        self.bus.drain()

    def finish(self) -> None:
        """Close whatever is open."""
        self.end_pass()
        self.clock.close_pending()
        self.model.untap()
        self.recorder.close()
