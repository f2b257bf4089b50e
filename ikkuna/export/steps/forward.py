"""Forwards, and the parts of a step that hold their measurements."""

from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "EARLIER_PART",
    "FIRST_PART",
    "GRADIENT_PARTS",
    "MICRO_PART",
    "STEP_PART",
    "UNCLIPPED_PART",
    "Forward",
    "Reach",
]

STEP_PART, UNCLIPPED_PART, EARLIER_PART, MICRO_PART, FIRST_PART = 0, 1, 2, 3, 4
"""Parts of a step: parameters; gradients before clipping; earlier micro-batches; gradients of micro-batches; the first forward."""

GRADIENT_PARTS = (UNCLIPPED_PART, MICRO_PART)


class Reach(IntEnum):
    """Use of the gradients of a forward."""

    NONE = 0
    CAPTURED = 1
    """``torch.autograd.grad`` returned gradients of parameters."""
    ACCUMULATED = 2
    """A backward added to the gradients of parameters."""


@dataclass(slots=True, eq=False)
class Forward:
    """An outermost call of the model.

    Parameters
    ----------
    part : int
        Part of the recorder that holds its measurements; the next number holds gradients of a backward that may not count.
        -1 after the forward was discarded.
    number : int
        The number of the forward in its step; -1 in another pass.
    reach : Reach
        What its gradients were used for.
    is_compiled : bool
        Whether it ran in a compiled graph.
    is_of_parts : bool
        Whether it consists of calls of modules outside any root.
    """

    part: int
    number: int = -1
    reach: Reach = Reach.NONE
    is_compiled: bool = False
    is_of_parts: bool = False

    @property
    def provisional_part(self) -> int:
        """The part that holds gradients of a backward that may not count."""
        return self.part + 1 if self.part >= 0 else -1
