"""Hears the gradients of what modules returned."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ikkuna.export.hooks.hook import Hook, watch_gradient
from ikkuna.export.hooks.hook_owner import HookOwner
from ikkuna.export.hooks.nested_tensors import with_batch_sizes
from ikkuna.export.hooks.slots import BASE, VIEW
from ikkuna.export.rows.site import Site

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["BackwardWatch"]


class BackwardWatch(HookOwner):
    """Looks at layer gradients, in the backward that reaches the parameters.

    Parameters
    ----------
    observer : who keeps the step
    """

    def __init__(self, observer: "Session") -> None:
        super().__init__(observer)
        self._hooks: dict[tuple[Site, str], Hook] = {}
        self._lasting: list[Any] = []
        self._running = (-1, True)
        self._views: Counter[tuple[Site, str]] = Counter()

    def watch(self, place: Site, output: Tensor, path: str, sizes: Tensor | None) -> None:
        """Look at the gradient of what a module returned; `sizes` are those of a packed sequence."""
        if sizes is not None:
            hook = Hook(self, "gradient_seen", place, path, sizes)
        elif (known := self._hooks.get((place, path))) is not None:
            hook = known
        else:
            hook = self._hooks[place, path] = Hook(self, "gradient_seen", place, path, None)
        self._lasting += watch_gradient(output, hook)

    def gradient_seen(self, place: Site, path: str, sizes: Tensor | None, grad: Tensor, role: int = 0) -> None:
        """Take a gradient, of an output or of the base of one that is a view."""
        observer = self._observer
        if observer.recorder.rows is None or observer.blind or not self._is_training():
            return
        if role and not self._is_first(place, path, role):
            return
        if observer.exchange.replicas > 1:
            grad = grad / observer.exchange.replicas  # the loss of all is the mean of each rank's
        observer.recorder.receive(place, with_batch_sizes(grad, sizes), path)

    def _is_training(self) -> bool:
        """Whether the running backward reaches a parameter: a gradient penalty's or an attack's first half does not."""
        task = torch._C._current_graph_task_id()
        if self._running[0] != task:
            self._running = task, self._observer.parameters.any_reached_by_backward()
            self._views.clear()
        return self._running[1]

    def _is_first(self, place: Site, path: str, role: int) -> bool:
        """Whether a gradient was not seen already, at the view whose base brings it again."""
        if role == VIEW:
            self._views[place, path] += 1
        elif role == BASE and self._views[place, path]:
            self._views[place, path] -= 1
            return False
        return True

    def step_over(self) -> None:
        """Take off what outlives a backward."""
        lasting, self._lasting = self._lasting, []
        for handle in lasting:
            handle.remove()
