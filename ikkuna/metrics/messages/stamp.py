"""The position of a message in training."""

from dataclasses import dataclass

__all__ = ["TRAINING", "Stamp"]


TRAINING = "training"
"""The name of the training pass."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The step, epoch and pass that a message belongs to.

    Parameters
    ----------
    global_step : int
        Number of optimizer steps before this one.
    train_step : int
        Number of optimizer steps before this one in the same epoch.
    epoch : int
        Number of finished epochs.
    pass_name : str
        `TRAINING`, or the name of another pass over data such as ``"testing"``.
    """

    global_step: int
    train_step: int
    epoch: int
    pass_name: str = TRAINING
