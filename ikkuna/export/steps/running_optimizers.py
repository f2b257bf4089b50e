"""The steps of optimizers in the open step of the training loop."""

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["RunningOptimizers"]


@dataclass(slots=True)
class _Running:
    """The running step of an optimizer."""

    owned: frozenset[int]
    depth: int = 1
    has_closure: bool = False


class RunningOptimizers:
    """Which optimizers are stepping, and which have stepped.

    Attributes
    ----------
    stepped : set of int
        The optimizers that have stepped in the open step.

    Examples
    --------
    >>> optimizers = RunningOptimizers()
    >>> optimizers.begin(1, frozenset({7}), has_closure=False)
    >>> optimizers.end(1), optimizers.stepped
    (True, {1})
    """

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self.stepped: set[int] = set()
        self._stepped_before: set[int] = set()

    def __bool__(self) -> bool:
        """Whether an optimizer is stepping."""
        return bool(self._running)

    @property
    def in_closure(self) -> bool:
        """Whether an optimizer is stepping that evaluates the model itself."""
        return any(running.has_closure for running in self._running.values())

    def is_stepping(self, optimizer: int) -> bool:
        """Whether a step of this optimizer that counts is running, and is not inside another call of itself."""
        return optimizer in self._running and self._running[optimizer].depth == 1

    def any_of(self, optimizers: Collection[int]) -> bool:
        """Whether one of these optimizers is stepping."""
        return not self._running.keys().isdisjoint(optimizers)

    def begin(self, optimizer: int, owned: frozenset[int], has_closure: bool) -> None:
        """Add the step of an optimizer."""
        self._running[optimizer] = _Running(owned, has_closure=has_closure)

    def begin_inside(self, optimizer: int, owned: frozenset[int], around: Collection[int]) -> bool:
        """Return whether a step is part of a step that is running already, of the same optimizer or of one that owns as much.

        Parameters
        ----------
        optimizer : int
            Identifier of the optimizer.
        owned : frozenset of int
            Identifiers of its parameters.
        around : collection of int
            The optimizers whose steps run around this one, each as often as it calls itself.
        """
        if optimizer in self._running:
            self._running[optimizer].depth = sum(other == optimizer for other in around) + 1
            return True
        return bool(around) and any(owned <= self._running[outer].owned for outer in around if outer in self._running)

    def end(self, optimizer: int) -> bool:
        """Return whether the step of an optimizer has ended, not only an inner call of itself."""
        running = self._running.get(optimizer)
        if running is None:
            return False
        running.depth -= 1
        if running.depth:
            return False
        del self._running[optimizer]
        self.stepped.add(optimizer)
        return True

    def forget_others(self, running: Collection[int]) -> bool:
        """Forget steps that are not among `running`, since they have raised; return whether there were some and none is left."""
        if not self._running:
            return False
        raised = [optimizer for optimizer in self._running if optimizer not in running]
        for optimizer in raised:
            del self._running[optimizer]
        return bool(raised) and not self._running

    def have_all_stepped(self, owners: Collection[int], covered: bool) -> bool:
        """Whether nothing runs and all owners have stepped.

        If the owners do not own everything that can be trained, the same optimizers must have stepped in the step before,
        since there may be optimizers that are not known yet.
        """
        if self._running or len(self.stepped) < len(owners) or not self.stepped.issuperset(owners):
            return False
        return covered or self.stepped == self._stepped_before

    def step_closed(self) -> None:
        """Keep which optimizers have stepped, for the next step."""
        self._stepped_before = set(self.stepped)

    def clear_running(self) -> None:
        """Forget the steps that are running."""
        self._running.clear()
