"""What happens while training: hears the taps, keeps the step, hands rows to the bus."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ikkuna.export.clock import TRAINING, Clock
from ikkuna.export.demand import Demand
from ikkuna.export.messages.bus import MessageBus
from ikkuna.export.messages.kinds import FORWARD_KINDS, NETWORK_KINDS
from ikkuna.export.messages.message import NetworkMessage, Stamp
from ikkuna.export.outputs import leaves
from ikkuna.export.parameters import TrackedParameters
from ikkuna.export.recorder import Place, Recorder
from ikkuna.export.taps import SLOTS, Undo, in_backward, observe, tap_module, watch_gradient
from ikkuna.modules import NamedModule, NamedParameter

__all__ = ["Observer"]

log = logging.getLogger("ikkuna")

_REEVALUATED = frozenset((*FORWARD_KINDS, *NETWORK_KINDS))


class Observer:
    """Turns calls of hooks into rows of steps.

    Parameters
    ----------
    bus : where rows and events go
    """

    def __init__(self, bus: MessageBus) -> None:
        self.bus = bus
        self.modules: tuple[NamedModule, ...] = ()
        self.roots: tuple[nn.Module, ...] = ()
        self.parameters = TrackedParameters()
        self.clock = Clock(self.parameters)
        self.clock.listen(self)
        self.blind = False
        self.sees_loss = False
        self.steps = 0
        self.skipped_updates = 0
        self._recorder = Recorder(bus.faults)
        self._interrupted: Recorder | None = None
        self._demand = Demand()
        self._slots: dict[Place, int] = {}
        self._undo: list[Undo] = []
        self._lasting: list[Any] = []
        self._before: list[tuple[NamedParameter, Tensor]] = []
        self._in_closure = self._evaluated = False
        self._epoch_announced = False
        self._warned = False

    @property
    def skipped(self) -> int:
        """Tensors without numbers, and updates there was no memory for."""
        return self.skipped_updates + self._recorder.unreadable

    def fault(self, where: str, error: Exception) -> None:
        """Take an error of our own."""
        self.bus.faults.own(where, error)

    def slot(self, kind: str, module: str | None = None) -> int:
        """Return the slot of a kind and module."""
        place = Place(kind, module)
        if place not in self._slots:
            self._slots[place] = SLOTS.assign(self, place)
        return self._slots[place]

    def receive(self, place: Place, tensor: Tensor, path: str) -> None:
        """Measure a tensor that a tap saw; called through `observe`."""
        try:
            self._recorder.receive(place, tensor, path)
        except Exception as error:
            self.fault(f"measuring {place.kind} of {place.module}", error)

    # -- forward --------------------------------------------------------------------------------------------------

    def root_entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the call of a root."""
        if self.blind or in_backward():
            return
        if (
            self._evaluated and self._recorder.rows is not None
        ):  # the closure is evaluated once more, and only the last time counts
            self._recorder.rows.drop(_REEVALUATED)
            self._evaluated = False
        if self.clock.root_entered(module, self._in_closure):
            self._observe_all("input_data", (args, kwargs) if kwargs else args)

    def root_left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the return of a root."""
        if self.blind or in_backward() or not self.clock.root_left():
            return
        self._observe_all("network_output", output)
        if self._in_closure:
            first = next((t for _, t in leaves(output) if t.requires_grad), None)
            if first is not None:
                first.register_hook(self._backward_seen)

    def _backward_seen(self, grad: Tensor) -> None:
        self._evaluated = True

    def _observe_all(self, kind: str, value: Any) -> None:
        if self._recorder.wants(kind):
            for path, tensor in leaves(value):
                observe(tensor, self.slot(kind), path)

    def module_called(
        self, activations: int | None, gradients: int | None, module: nn.Module, args: Any, output: Any
    ) -> None:
        """Take one call of a module: look at what it returned, and arm the look at its gradient."""
        recomputing = in_backward()
        if self.blind or not (recomputing or self.clock.counts(module)):
            return
        for path, tensor in leaves(output):
            if activations is not None and not recomputing:
                observe(tensor, activations, path)
            if gradients is not None and tensor.requires_grad:
                self._lasting += watch_gradient(tensor, gradients, path)

    def loss_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take one call of the loss module."""
        if self.blind or in_backward() or not self.clock.counting or not isinstance(output, Tensor):
            return
        given = [*args, *kwargs.values()]
        seen = dict(zip(("network_output", "input_labels"), (g for g in given if isinstance(g, Tensor)), strict=False))
        seen = {kind: tensor.detach() for kind, tensor in {**seen, "loss": output}.items()}
        labels = seen.get("input_labels")
        if labels is not None:
            self._recorder.receive(Place("input_labels"), labels, "")
        if self._recorder.wants("loss"):
            weight = _label_count(labels, module) if output.numel() == 1 else 1
            self._recorder.receive(Place("loss"), seen["loss"], "", weight)
        self._recorder.receive_together(seen)

    # -- optimizers -----------------------------------------------------------------------------------------------

    def optimizer_starts(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the moment before an optimizer's step: weights as they were used, and gradients as they will be."""
        if self.blind or not self.clock.optimizer_starts(optimizer):
            return
        self._in_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if not self._recorder.plan.parameters:
            return
        owned = self.parameters.of(optimizer)
        self._observe_weights(owned)
        if self.clock.first_optimizer:
            self._observe_weights(self.parameters.orphans())
        if not self._in_closure:  # before a closure runs, gradients are those of the step before
            self._observe_gradients(owned)
        self._before += self._copies(owned)

    def optimizer_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the moment after an optimizer's step: its updates."""
        if self.blind or not self.clock.optimizer_ended(optimizer):
            return
        if self._recorder.plan.parameters:
            if self._in_closure:
                self._observe_gradients(self.parameters.of(optimizer))
            before, self._before = self._before, []
            for named, copy in before:
                torch.sub(named.parameter.detach(), copy, out=copy)
                observe(
                    copy, self.slot("bias_updates" if named.is_bias else "weight_updates", named.module), named.path
                )
        self._in_closure = self._evaluated = False
        self.clock.close_if_complete()

    def _observe_weights(self, parameters: Iterable[NamedParameter]) -> None:
        for named in self._wanted("weights", "biases", parameters):
            observe(named.parameter, self.slot("biases" if named.is_bias else "weights", named.module), named.path)

    def _observe_gradients(self, parameters: Iterable[NamedParameter]) -> None:
        for named in self._wanted("weight_gradients", "bias_gradients", parameters):
            if (grad := named.parameter.grad) is not None:
                observe(
                    grad, self.slot("bias_gradients" if named.is_bias else "weight_gradients", named.module), named.path
                )

    def _copies(self, parameters: Iterable[NamedParameter]) -> list[tuple[NamedParameter, Tensor]]:
        copies: list[tuple[NamedParameter, Tensor]] = []
        for named in self._wanted("weight_updates", "bias_updates", parameters):
            try:
                copies.append((named, named.parameter.detach().clone()))
            except RuntimeError:  # no memory for a copy: the update goes unseen, training goes on
                self.skipped_updates += 1
        return copies

    def _wanted(self, weights: str, biases: str, parameters: Iterable[NamedParameter]) -> list[NamedParameter]:
        wants = self._recorder.wants
        return [named for named in parameters if wants(biases if named.is_bias else weights, named.module)]

    # -- steps and passes -----------------------------------------------------------------------------------------

    def step_opened(self, stamp: Stamp) -> None:
        """Begin to record a step."""
        if not self._epoch_announced:
            self._epoch_announced = True
            self.bus.post(NetworkMessage(stamp, "epoch_started"))
        self.bus.post(NetworkMessage(stamp, "batch_started"))
        self._recorder.open(stamp, self._demand.plan(self.bus.subscriptions, stamp))
        self._tap()

    def step_closed(self, stamp: Stamp) -> None:
        """Hand what was recorded to the bus."""
        self._untap()
        self._before = []
        self.steps += 1
        self._warn_of_missing_loss()
        if (rows := self._recorder.close()) is not None:
            self.bus.post((rows, self._recorder.remember))
        self.bus.post(NetworkMessage(stamp, "batch_finished"))
        self.bus.drain()

    def epoch_finished(self) -> None:
        """Close what is pending, tell that the epoch is over, begin another."""
        self.clock.close_pending()
        self._in_closure = False
        self.bus.post(NetworkMessage(self.clock.pass_stamp(), "epoch_finished"))
        self.clock.next_epoch()
        self._epoch_announced = False
        self.bus.drain()

    def begin_pass(self, name: str) -> None:
        """Record another pass over data under its own name, until `end_pass`; an open step waits."""
        if name == self.clock.pass_name:
            return
        self.end_pass()
        if name == TRAINING:
            return
        self.clock.close_pending()
        self._untap()
        self.clock.pass_name = name
        self._interrupted, self._recorder = self._recorder, Recorder(self.bus.faults)
        stamp = self.clock.pass_stamp()
        self._recorder.open(stamp, self._demand.plan(self.bus.subscriptions, stamp))
        self._tap()

    def end_pass(self) -> None:
        """Hand what another pass saw to the bus, and go back to training."""
        if self._interrupted is None:
            return
        self._untap()
        if (rows := self._recorder.close()) is not None:
            self.bus.post((rows, self._recorder.remember))
        self._recorder, self._interrupted = self._interrupted, None
        self.clock.pass_name = TRAINING
        if self._recorder.rows is not None:
            self._tap()
        self.bus.drain()

    def finish(self) -> None:
        """Close whatever is open."""
        self.end_pass()
        self.clock.close_pending()
        self._untap()
        self._recorder.close()

    def _tap(self) -> None:
        if not self._recorder.plan.forward:
            return
        for named in self.modules:
            activations, gradients = (self._wanted_slot(kind, named.name) for kind in FORWARD_KINDS)
            if activations is not None or gradients is not None:
                is_root = any(named.module is root for root in self.roots)
                self._undo.append(tap_module(named.module, self, activations, gradients, first=is_root))

    def _wanted_slot(self, kind: str, module: str) -> int | None:
        return self.slot(kind, module) if self._recorder.wants(kind, module) else None

    def _untap(self) -> None:
        undo, self._undo = self._undo, []
        for remove in undo:
            remove()
        lasting, self._lasting = self._lasting, []
        for handle in lasting:
            handle.remove()

    def _warn_of_missing_loss(self) -> None:
        plan = self._recorder.plan
        if not self._warned and not self.sees_loss and (plan.together or plan.kinds & {"loss", "input_labels"}):
            self._warned = True
            log.warning(
                "a subscriber wants the loss or the labels; tell the exporter where they are with set_loss(loss_module)"
            )


def _label_count(labels: Tensor | None, loss: nn.Module) -> int | Tensor:
    """Return how many labels a mean loss is the mean of; on a device the count stays there."""
    if labels is None:
        return 1
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None or labels.is_floating_point():
        return labels.numel()
    count = torch.count_nonzero(labels != ignored)
    return int(count.item()) if count.device.type == "cpu" else count
