"""Tells where a forward begins, and what those before it are worth."""

from typing import TYPE_CHECKING

from torch import Tensor

from ikkuna.distributed.dtensor import holds_gradients
from ikkuna.export.hooks.hook import Hook
from ikkuna.export.hooks.hook_owner import HookOwner
from ikkuna.export.hooks.nested_tensors import Leaves
from ikkuna.export.messages.kinds import FORWARD_KINDS, MICRO_KINDS, NETWORK_KINDS

if TYPE_CHECKING:
    from ikkuna.export.session import Session

__all__ = ["Forwards"]

_REEVALUATED = frozenset((*FORWARD_KINDS, *MICRO_KINDS, *NETWORK_KINDS))


class Forwards(HookOwner):
    """Follows the forwards and backwards of a step.

    One after the other they are micro-batches, as long as gradients are kept.  Of a closure the last evaluation counts.
    Some networks are never called themselves, only their parts: then the first call of a part begins a step,
    which is learned from an optimizer that steps without one.

    Parameters
    ----------
    observer : who keeps the step

    Attributes
    ----------
    is_rootless : whether roots are never called, only their parts
    """

    def __init__(self, observer: "Session") -> None:
        super().__init__(observer)
        self.is_rootless = False
        self._backward_seen = self._backward_in_closure = False
        self._hook = Hook(self, "backward_seen")
        self._awaits_backward = False  # of a part
        self._were_before = False  # parts were called before the step was open
        self._is_late = False

    def begin(self) -> None:
        """Take a forward; one after a backward, without a step in between, is a closure's, a micro-batch's, or follows a skipped step."""
        if not self._backward_seen:
            return
        observer = self._observer
        if observer.optimizers.in_closure:
            # what came before the closure counts as well if its gradients are still there: it was a micro-batch
            if self._backward_in_closure or not self._any_gradient_waits():
                self._forget()
            self._backward_seen = False
        elif observer.clock.awaits_optimizer and not self._any_gradient_waits():
            self._backward_seen = False
            observer.clock.abandon()  # gradients were thrown away: a gradient scaler skipped the step

    def _any_gradient_waits(self) -> bool:
        roots = self._observer.model.taps.roots
        return self._observer.parameters.any_has_gradient() or any(map(holds_gradients, roots))

    def _forget(self) -> None:
        """Drop what this step has seen of forwards and what came of them."""
        if (rows := self._observer.recorder.rows) is not None:
            rows.drop(_REEVALUATED)

    def root_called(self) -> None:
        """Take the call of a root in training."""
        self.is_rootless = self._is_late = False

    def await_backward(self, outputs: Leaves) -> bool:
        """Be told of a backward that comes through one of these, unless one has been seen; say whether one will be told."""
        if not self._backward_seen:
            for _, tensor in outputs:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._hook)
                    return True
        return False

    def backward_seen(self, grad: Tensor | None = None) -> None:
        """Take a backward."""
        self._backward_seen = True
        self._backward_in_closure = self._observer.optimizers.in_closure

    # -- parts that no root has called ----------------------------------------------------------------------------

    def part_called(self, outputs: Leaves) -> None:
        """Take the call of a part: it may begin a step, and a forward."""
        clock = self._observer.clock
        if self.is_rootless:
            clock.begin(self._observer.optimizers.in_closure)
        elif not clock.is_open:
            self._were_before = True
            return
        if self._backward_seen:
            self.begin()
            self._awaits_backward = False
        if not self._awaits_backward:
            self._awaits_backward = self.await_backward(outputs)

    def step_opened_late(self, in_closure: bool) -> None:
        """Take a step that only its optimizer has opened: no root is ever called, or not outside of the optimizer's closure."""
        self._is_late = in_closure and self._were_before
        if self._is_late or not in_closure:
            self.is_rootless = True  # until a root is called

    def step_over(self) -> None:
        """Forget that there was a backward, and what is not all of its step."""
        if self._is_late:
            self._forget()
        self._backward_seen = self._awaits_backward = self._were_before = self._is_late = False
