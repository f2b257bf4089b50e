"""Counts steps, epochs and evaluation passes of the training loop, and measures the time that ikkuna takes."""

import math
import threading
import time
from collections.abc import Callable

from ikkuna.errors import ConfigError
from ikkuna.metrics.messages.stamp import TRAINING, Stamp


class StepCounters:
    """The numbers of steps, of steps in this epoch, and of epochs.

    Attributes
    ----------
    steps_per_epoch : int or None
        Number of steps after which an epoch ends by itself; ``None`` if it does not.

    Examples
    --------
    >>> counters = StepCounters()
    >>> counters.step_closed()
    0
    >>> counters.global_step, counters.train_step, counters.epoch
    (1, 1, 0)
    """

    def __init__(self) -> None:
        # global step, step in this epoch, epoch; one object, so that an interrupt cannot come between two assignments
        self._numbers = 0, 0, 0
        self._epoch_is_announced = self._epoch_is_open = False
        self.steps_per_epoch: int | None = None

    @property
    def global_step(self) -> int:
        """Number of steps."""
        return self._numbers[0]

    @property
    def train_step(self) -> int:
        """Number of steps in this epoch."""
        return self._numbers[1]

    @property
    def epoch(self) -> int:
        """Number of epochs that have ended."""
        return self._numbers[2]

    def stamp(self, back: int = 0, pass_name: str = TRAINING) -> Stamp:
        """Return the stamp of the next step, or of the step that is `back` steps before it, after it if `back` is negative."""
        global_step, train_step, epoch = self._numbers
        return Stamp(max(global_step - back, 0), max(train_step - back, 0), epoch, pass_name)

    def step_opened(self, is_certain: bool = True) -> bool:
        """Return whether the step that opens is the first of its epoch; if it is not certain, the epoch has not begun yet."""
        starts_epoch, self._epoch_is_announced = not self._epoch_is_announced, True
        self._epoch_is_open = self._epoch_is_open or is_certain
        return starts_epoch

    def step_closed(self) -> int:
        """Count a step; return its number."""
        global_step, train_step, epoch = self._numbers
        self._numbers = global_step + 1, train_step + 1, epoch
        return global_step

    def steps_closed(self, first: Stamp, steps: int) -> None:
        """Count a number of steps from `first` on; a second call changes nothing."""
        self._numbers = first.global_step + steps, first.train_step + steps, self.epoch

    @property
    def steps_left(self) -> float:
        """Number of steps until the epoch ends by itself."""
        return math.inf if self.steps_per_epoch is None else self.steps_per_epoch - self.train_step

    @property
    def epoch_is_full(self) -> bool:
        """Whether the epoch has all of its steps."""
        return self.steps_left <= 0

    @property
    def epoch_has_begun(self) -> bool:
        """Whether the epoch has a step, open or closed."""
        return self._epoch_is_open or self.train_step > 0

    def epoch_closed(self) -> None:
        """Count an epoch."""
        self._numbers = self.global_step, 0, self.epoch + 1
        self._epoch_is_announced = self._epoch_is_open = False

    def set_steps_per_epoch(self, steps: int | None) -> None:
        """Set the number of steps after which an epoch ends by itself.

        Raises
        ------
        ConfigError
            If `steps` is neither ``None`` nor a positive int.
        """
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ConfigError(f"steps_per_epoch must be an int >= 1 or None, got {steps!r}")
        self.steps_per_epoch = steps

    def state_dict(self) -> dict[str, int]:
        """Return the numbers, to be saved with a checkpoint."""
        return {"global_step": self.global_step, "train_step": self.train_step, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue to count from what `state_dict` returned.

        Raises
        ------
        ConfigError
            If `state` has other keys, or values that are no non-negative ints.
        """
        keys = self.state_dict().keys()
        is_known = isinstance(state, dict) and state.keys() == keys
        if not is_known or any(not isinstance(v, int) or v < 0 for v in state.values()):
            raise ConfigError(f"load_state_dict() needs what state_dict() returned, got {state!r}")
        self._numbers = state["global_step"], state["train_step"], state["epoch"]


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
    thrown_away : int
        Number of gradients that were cleared before a step, in a row behind others of the same weights.
    has_forwards : bool
        Whether there was an outermost forward.

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

    __slots__ = (
        *("_forwards", "_is_apart", "_last", "_modes", "_thrown", "in_evaluation_mode", "in_training_mode"),
        *("has_forwards", "repeated", "thrown_away"),
    )

    def __init__(self) -> None:
        self.in_training_mode = self.in_evaluation_mode = self.repeated = 0
        self._forwards = 0
        self._modes: set[bool] = set()
        self._last = 0  # the step of the last forward without gradients
        self._is_apart = False
        self.thrown_away = 0
        self.has_forwards = False
        self._thrown = (-1, 0)

    def gradients_cleared(self, step: int, version: int) -> None:
        """Handle gradients that were cleared before an optimizer has used them.

        A search for a disturbance, as that of a sharpness-aware step, clears gradients once a step, and moves the weights.

        Parameters
        ----------
        step : int
            The number of the step that would have used them.
        version : int
            Changes with each change of the weights in place.

        Examples
        --------
        >>> events = LoopEvents()
        >>> for step, version in ((3, 7), (3, 7), (3, 7), (4, 8), (5, 9), (5, 10)):
        ...     events.gradients_cleared(step, version)
        >>> events.thrown_away
        2
        """
        self.thrown_away += self._thrown == (step, version)
        self._thrown = step, version

    def forward(self, step: int, training: bool, gradients: bool) -> None:
        """Handle the beginning of an outermost forward.

        Parameters
        ----------
        step : int
            The number of the open step, or of the next one.
        training, gradients : bool
            Whether the model is in training mode, and whether gradients are enabled.
        """
        self.has_forwards = True
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
    def is_apart(self) -> bool:
        """Whether the last forward was of an evaluation, and the one before it is at least 10 steps ago."""
        return self._is_apart and self.is_evaluating

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


class _Local(threading.local):
    depth = 0
    since = 0.0


class Stopwatch:
    """Adds up the time between `start` and `stop` on each thread; nested pairs are counted once.

    Parameters
    ----------
    others : callable, optional
        Returns the seconds that were measured elsewhere, outside of such pairs.

    Attributes
    ----------
    spent : float
        Seconds between `start` and `stop`, on all threads together.
    local : object
        The number of open pairs on this thread, and when the outermost of them began.

    Examples
    --------
    >>> watch = Stopwatch()
    >>> watch.start(), watch.start(), watch.stop(), watch.stop()
    (None, None, None, None)
    >>> 0 < watch.spent < 1, watch.overhead()
    (True, 0.0)
    """

    __slots__ = ("_began", "_ended", "_lap", "_others", "_spent_before", "_spent_until_end", "local", "spent")

    def __init__(self, others: Callable[[], float] = float) -> None:
        self.spent = 0.0
        self._others = others
        self.local = _Local()
        self._began: float | None = None
        self._ended = 0.0
        self._spent_before = self._spent_until_end = 0.0
        self._lap: tuple[float, float] | None = None

    def start(self) -> None:
        """Start to count."""
        local = self.local
        local.depth += 1
        if local.depth == 1:
            local.since = time.perf_counter()

    def stop(self) -> None:
        """Stop to count."""
        local = self.local
        local.depth -= 1
        if local.depth == 0:
            self.spent += time.perf_counter() - local.since

    def restart(self) -> None:
        """Start to count at an outermost `start` of this thread, after exceptions have left starts without their stops."""
        self.local.depth, self.local.since = 1, time.perf_counter()

    def lap(self) -> tuple[float, float] | None:
        """Return the seconds since the last call and how many of them ikkuna took; ``None`` for the first call."""
        now = time.perf_counter()
        spent = self._spent_until(now)
        before, self._lap = self._lap, (now, spent)
        return None if before is None else (now - before[0], spent - before[1])

    def step_ended(self) -> None:
        """Mark the end of a step; the first one is left out, because it creates what the others reuse."""
        self._ended = time.perf_counter()
        self._spent_until_end = self._spent_until(self._ended)
        if self._began is None:
            self._began, self._spent_before = self._ended, self._spent_until_end

    def steps_passed(self, ended: float, spent: float) -> None:
        """Mark the end of the last of several steps, in seconds of the clock and of `spent`."""
        spent += self._others()
        self._lap = ended, spent
        self._ended, self._spent_until_end = ended, spent

    def _spent_until(self, now: float) -> float:
        """Return the seconds that were spent, including the pair that is open on this thread."""
        return self.spent + self._others() + (now - self.local.since if self.local.depth else 0.0)

    def overhead(self, beside: float = 0.0) -> float:
        """Return the time that ikkuna took as a share of the remaining time, from the second step on; 0 before.

        It can be larger than the slowdown, because a training step and another thread may run at the same time.

        Parameters
        ----------
        beside : float
            Seconds that other threads of ikkuna have kept the interpreter busy.
        """
        if self._began is None:
            return 0.0
        own = self._spent_until_end - self._spent_before + beside
        others = self._ended - self._began - own
        return own / others if others > 0 else 0.0

    @property
    def spent_later(self) -> float:
        """Seconds that ikkuna took from the second step on."""
        return self._spent_until_end - self._spent_before
