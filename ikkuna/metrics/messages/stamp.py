"""The position of a message in training."""

from dataclasses import dataclass, field

TRAINING = "training"
"""The name of the training pass."""

VALIDATION = "validation"
"""The name of the evaluations in the training loop, which are recognised without a call of the user's."""


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
    optimizers : tuple of int
        The optimizers that stepped, numbered from 0 in the order of their first steps; those of the same parameters have one number.
        Known in ``compute``; empty in ``measure``, at steps that the user marks with ``exporter.step()``, and in other passes.
    completes : tuple of Stamp
        Earlier steps whose samples this step completes: optimizers that take turns have not all stepped since.
        A step is sampled if its own number or that of one of these is due.
    """

    global_step: int
    train_step: int
    epoch: int
    pass_name: str = TRAINING
    optimizers: tuple[int, ...] = field(default=(), compare=False, repr=False)
    completes: tuple["Stamp", ...] = field(default=(), compare=False, repr=False)
