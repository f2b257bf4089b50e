"""Counts steps and epochs."""

from ikkuna.errors import ConfigError
from ikkuna.export.messages.stamp import TRAINING, Stamp

__all__ = ["StepCounters"]


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
    >>> counters.global_step, counters.train_step, counters.epoch
    (1, 1, 0)
    """

    def __init__(self) -> None:
        # global step, step in this epoch, epoch; one object, so that an interrupt cannot come between two assignments
        self._numbers = 0, 0, 0
        self._epoch_is_open = False
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
        """Return the stamp of the next step, or of the step that is `back` steps before it."""
        global_step, train_step, epoch = self._numbers
        return Stamp(max(global_step - back, 0), max(train_step - back, 0), epoch, pass_name)

    def step_opened(self) -> bool:
        """Return whether the step that opens is the first of its epoch."""
        starts_epoch, self._epoch_is_open = not self._epoch_is_open, True
        return starts_epoch

    def step_closed(self) -> None:
        """Count a step."""
        global_step, train_step, epoch = self._numbers
        self._numbers = global_step + 1, train_step + 1, epoch

    @property
    def epoch_is_full(self) -> bool:
        """Whether the epoch has all of its steps."""
        return self.steps_per_epoch is not None and self.train_step >= self.steps_per_epoch

    @property
    def epoch_has_begun(self) -> bool:
        """Whether the epoch has a step, open or closed."""
        return self._epoch_is_open or self.train_step > 0

    def epoch_closed(self) -> None:
        """Count an epoch."""
        self._numbers = self.global_step, 0, self.epoch + 1
        self._epoch_is_open = False

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
