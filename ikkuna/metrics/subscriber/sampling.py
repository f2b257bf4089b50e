"""Switches of the user while training runs: sampling at all, and how often."""

__all__ = ["Sampling"]


_KEPT = 32  # changes; measurements of earlier steps have been delivered


class Sampling:
    """The changes of sampling, each from a step on.  What applies to a step never changes after the step has begun.

    Attributes
    ----------
    is_changed : bool
        Whether there was any change.

    Examples
    --------
    >>> sampling = Sampling()
    >>> sampling.change(10, paused=True)
    >>> sampling.change(20, paused=False, every=1)
    >>> sampling.at(9), sampling.at(10), sampling.at(20)
    ((False, None), (True, None), (False, 1))
    """

    def __init__(self) -> None:
        self.is_changed = False
        self._changes: tuple[tuple[int, bool, int | None], ...] = ((0, False, None),)

    @property
    def is_paused(self) -> bool:
        """Whether the last change pauses sampling."""
        return self._changes[-1][1]

    def at(self, step: int) -> tuple[bool, int | None]:
        """Return whether sampling is paused at a step, and at which steps all subscribers sample; ``None`` for their own."""
        return next(
            ((paused, every) for first, paused, every in reversed(self._changes) if first <= step), (False, None)
        )

    def change(self, step: int, paused: bool | None = None, every: int | None = -1) -> None:
        """Change the sampling from `step` on.

        Parameters
        ----------
        step : int
            The first step to which the change applies.
        paused : bool, optional
            Whether nothing is sampled; by default as before.
        every : int or None
            All subscribers sample each multiple of this number; ``None`` for their own steps, -1 for as before.
        """
        _, was_paused, was_every = self._changes[-1]
        change = step, was_paused if paused is None else paused, was_every if every == -1 else every
        self._changes = (*(known for known in self._changes if known[0] < step), change)[-_KEPT:]
        self.is_changed = True
