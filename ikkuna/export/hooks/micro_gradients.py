"""Hears what each backward pass adds to the gradients of parameters."""

from typing import TYPE_CHECKING

from torch import Tensor

from ikkuna.export.hooks.hook import Undo, tap_gradient
from ikkuna.export.hooks.hook_owner import HookOwner
from ikkuna.export.rows.site import Site
from ikkuna.export.steps.step_tracker import TRAINING

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["GradientWatch"]


class GradientWatch(HookOwner):
    """Looks at the gradients of one micro-batch, before they are added to those of the others.

    They are as autograd computed them: scaled as the loss was, not clipped, of this process alone.

    Parameters
    ----------
    observer : who keeps the step
    """

    def __init__(self, observer: "Session") -> None:
        super().__init__(observer)
        self._undo: list[Undo] = []

    def step_opened(self) -> None:
        """Look at the parameters whose gradients somebody wants."""
        observer = self._observer
        if not observer.recorder.plan.micro_gradients:
            return
        for named in observer.parameters.all:
            kind = "bias_micro_gradients" if named.is_bias else "weight_micro_gradients"
            place = observer.place(kind, named.module)
            if not (named.parameter.requires_grad and observer.recorder.wants(place)):
                continue
            if (node := observer.parameters.node(named.parameter)) is not None:
                self._undo.append(tap_gradient(node, self, place, named.path))

    def gradient_comes(self, place: Site, path: str, grads: tuple[Tensor | None, ...]) -> None:
        """Take a gradient that is about to be added."""
        observer = self._observer
        if grads[0] is not None and observer.clock.pass_name == TRAINING and not observer.blind:
            observer.recorder.receive(place, grads[0], path)

    def step_closed(self) -> None:
        """Look no more."""
        undo, self._undo = self._undo, []
        for remove in undo:
            remove()
