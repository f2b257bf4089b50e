"""A state machine that recognises evaluation passes in the user's own training loop."""

__all__ = ["LoopEvents"]

_FEWEST = 2
_APART = 10


class LoopEvents:
    """Counts evaluation passes of the training loop by the mode of their forwards.

    A pass is a sequence of at least 2 outermost forwards without gradients, with no training forward and no step between them.
    It counts as an evaluation if the last forward without gradients before it is at least 10 steps ago: a loop that needs such
    forwards for its steps makes them more often, as for a target network, a generator, a teacher, or a reentrant checkpoint.

    Each method takes an event; the facts can be read at any time.  An event that was not seen changes nothing but the facts about it.

    Attributes
    ----------
    in_training_mode : int
        Number of evaluations in which every forward was in training mode.
    in_evaluation_mode : int
        Number of passes, also frequent ones and those of one forward, that had a forward in evaluation mode.
    repeated : int
        Number of those of them that had at least 2 forwards.

    Examples
    --------
    >>> events = LoopEvents()
    >>> for step in range(40):
    ...     events.forward(step, training=True, gradients=True)
    ...     if step % 20 == 19:
    ...         for _ in range(3):
    ...             events.forward(step + 1, training=True, gradients=False)
    >>> events.forward(40, training=True, gradients=True)
    >>> events.in_training_mode, events.in_evaluation_mode
    (2, 0)
    """

    __slots__ = ("_forwards", "_is_apart", "_last", "_modes", "in_evaluation_mode", "in_training_mode", "repeated")

    def __init__(self) -> None:
        self.in_training_mode = self.in_evaluation_mode = self.repeated = 0
        self._forwards = 0
        self._modes: set[bool] = set()
        self._last = 0  # the step of the last forward without gradients
        self._is_apart = False

    def forward(self, step: int, training: bool, gradients: bool) -> None:
        """Handle the beginning of an outermost forward.

        Parameters
        ----------
        step : int
            The number of the open step, or of the next one.
        training, gradients : bool
            Whether the model is in training mode, and whether gradients are enabled.
        """
        if gradients:
            if self._forwards:
                self._end()
            return
        if self._forwards and step > self._last:
            self._end()
        if not self._forwards:
            self._is_apart = step >= self._last + _APART
        self._forwards += 1
        self._modes.add(training)
        self._last = step

    @property
    def is_evaluating(self) -> bool:
        """Whether the last forward was of an evaluation: without gradients, and in evaluation mode or in a pass that is apart."""
        return self._forwards > 0 and (False in self._modes or self._is_apart)

    def _end(self) -> None:
        """End the pass."""
        if False in self._modes:
            self.in_evaluation_mode += 1
            self.repeated += self._forwards >= _FEWEST
        elif self._forwards >= _FEWEST and self._is_apart:
            self.in_training_mode += 1
        self._forwards = 0
        self._modes.clear()
