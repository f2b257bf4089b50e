"""Hears the hooks of the model and of the loss module."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ikkuna.export.hooks.hook import ModulePlaces, in_backward, received
from ikkuna.export.hooks.hook_owner import HookOwner
from ikkuna.export.hooks.modules import ForwardTaps
from ikkuna.export.hooks.nested_tensors import Leaves, batch_sizes, leaves, with_batch_sizes
from ikkuna.export.steps.forwards import Forwards
from ikkuna.export.steps.step_tracker import TRAINING

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["ModelWatch"]

log = logging.getLogger("ikkuna")


class ModelWatch(HookOwner):
    """Notes where a forward begins and ends, and what modules return in between.

    Parameters
    ----------
    observer : who keeps the step
    in_graph : whether compiled models are looked at within their graphs

    Attributes
    ----------
    taps : the hooks on modules
    resolve : finds the modules again, after the user may have put others in their place
    reconsider : looks again at what is wanted, after the model has proved to be compiled
    forwards : where they begin
    sees_loss : whether the loss module is known
    """

    def __init__(self, observer: "Session", in_graph: bool = True) -> None:
        super().__init__(observer)
        self.taps = ForwardTaps(observer, in_graph)
        self.resolve: Callable[[], None] = lambda: None
        self.reconsider: Callable[[], None] = lambda: None
        self.sees_loss = False
        self.forwards = Forwards(observer)
        self._warned = False

    # -- hooks ----------------------------------------------------------------------------------------------------

    def root_entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the call of a root."""
        observer = self._observer
        if observer.blind or in_backward():
            return
        if observer.clock.depth == 0:
            self.forwards.begin()
        self.taps.settle(False)
        if observer.clock.root_entered(module, observer.optimizers.in_closure):
            if observer.clock.pass_name == TRAINING:
                self.forwards.root_called()
            self._observe_all("input_data", (args, kwargs) if kwargs else args)

    def compiled_root_entered(self, counts: bool) -> None:
        """Take the call of a compiled root, told by the operator its hook left in the graph."""
        observer = self._observer
        if observer.blind or in_backward():
            return
        self.forwards.begin()
        self.taps.settle(True)
        observer.clock.compiled_root_entered(counts, observer.optimizers.in_closure)
        self.forwards.root_called()

    def root_left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the return of a root."""
        observer = self._observer
        if observer.blind or in_backward() or not observer.clock.root_left():
            return
        self._observe_all("network_output", output)
        if torch.is_grad_enabled():
            self.forwards.await_backward(leaves(output))

    def _observe_all(self, kind: str, value: Any) -> None:
        recorder, place = self._observer.recorder, self._observer.place(kind)
        if recorder.wants(place):
            for path, tensor in leaves(value):
                recorder.receive(place, tensor, path)

    def module_called(self, places: ModulePlaces, module: nn.Module, args: Any, output: Any) -> None:
        """Take one call of a module: look at what it received and returned, and arm the look at its gradient."""
        observer = self._observer
        recomputing = in_backward()
        if observer.blind or not (recomputing or observer.clock.counts(module)):
            return
        outputs, sizes = leaves(output), batch_sizes(output)
        if not recomputing and observer.clock.is_outside and not self.taps.is_compiled:
            self.forwards.part_called(outputs)
        if observer.recorder.rows is None:
            return  # hooks stay on between steps
        if not recomputing:
            self._see_forward(places, args, outputs, sizes)
        if places.gradients is not None:
            for path, tensor in outputs:
                if tensor.requires_grad:
                    observer.backward.watch(places.gradients, tensor, path, None if path else sizes)

    def traced_module_called(self) -> None:
        """Take a call in a compiled graph, which may be of a part, or of a method that calls the parts."""
        if self._observer.clock.is_outside and not self.taps.is_compiled:
            self.forwards.part_called([])

    def _see_forward(self, places: ModulePlaces, args: Any, outputs: Leaves, sizes: Tensor | None) -> None:
        receive = self._observer.recorder.receive
        if places.inputs is not None:
            for path, tensor in received(args, outputs):
                receive(places.inputs, tensor, path)
        if places.activations is not None:
            for path, tensor in outputs:
                receive(places.activations, tensor if path else with_batch_sizes(tensor, sizes), path)

    def loss_called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take one call of the loss module."""
        observer = self._observer
        if observer.blind or in_backward() or not observer.clock.counting or not isinstance(output, Tensor):
            return
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        seen = dict(zip(("network_output", "input_labels"), given, strict=False))
        seen = {kind: tensor.detach() for kind, tensor in {**seen, "loss": output}.items()}
        recorder, labels = observer.recorder, seen.get("input_labels")
        if labels is not None:
            recorder.receive(observer.place("input_labels"), labels, "")
        if recorder.wants(loss := observer.place("loss")):
            weight = _label_count(labels, module) if output.numel() == 1 else None
            recorder.receive(loss, output, "", weight)
        recorder.receive_together(seen)

    def warn_of_missing_loss(self) -> None:
        """Say once that a subscriber waits for a loss nobody showed us."""
        plan = self._observer.recorder.plan
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
