"""The calls of the model that run on each thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikkuna.export.steps.forward import Forward

__all__ = ["RunningCalls"]


@dataclass(slots=True)
class _Thread:
    """Calls that run on one thread.

    Parameters
    ----------
    calls : list of Forward or None
        The running calls of roots, the outermost first; ``None`` for a call that does not count.
    last : Forward, optional
        The last outermost call, if it counts.
    """

    calls: list[Forward | None] = field(default_factory=list)
    last: Forward | None = None


class RunningCalls:
    """The running calls of roots, and the last outermost one, of each thread.

    Examples
    --------
    >>> calls, forward = RunningCalls(), Forward(4)
    >>> calls.begin(0, forward)
    >>> calls.is_inside(0, depth=None), calls.end(0) is forward, calls.last(0) is forward
    (True, True, True)
    """

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}

    def of(self, thread: int) -> Sequence[Forward | None]:
        """Return the forward of each running call on a thread; ``None`` for a call that does not count."""
        known = self._threads.get(thread)
        return known.calls if known is not None else ()

    def last(self, thread: int) -> Forward | None:
        """Return the running forward of a thread or else its last one; ``None`` if it does not count."""
        known = self._threads.get(thread)
        return known.last if known is not None else None

    def set_last(self, thread: int, forward: Forward | None) -> None:
        """Set the forward that ran last on a thread, without a call that runs."""
        self._threads.setdefault(thread, _Thread()).last = forward

    def is_inside(self, thread: int, depth: int | None) -> bool:
        """Whether a call runs on a thread.

        Parameters
        ----------
        thread : int
            Identifier of the thread.
        depth : int, optional
            Number of calls that really run, if it is known; others were interrupted, and are forgotten.
        """
        known = self._threads.get(thread)
        if known is None:
            return False
        if depth is not None:
            del known.calls[depth:]
        return bool(known.calls)

    def begin(self, thread: int, forward: Forward | None) -> None:
        """Add an outermost call."""
        known = self._threads.setdefault(thread, _Thread())
        known.last = forward
        known.calls.append(forward)

    def begin_inner(self, thread: int) -> None:
        """Add a call inside an outermost one, which has the same forward."""
        calls = self._threads[thread].calls
        calls.append(calls[0])

    def end(self, thread: int) -> Forward | None:
        """Remove the innermost call; return its forward if it was an outermost one that counts."""
        known = self._threads.get(thread)
        if known is None or not known.calls:
            return None
        forward = known.calls.pop()
        return forward if not known.calls else None
