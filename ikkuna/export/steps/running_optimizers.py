"""Which optimizers are stepping right now."""

import sys
from types import FrameType

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["step_calls"]


def step_calls() -> list[Optimizer]:
    """Return the optimizers whose ``step()`` runs on this thread, the innermost first, each as often as it calls itself.

    A step that raised has no last hook that could tell of it, but torch's wrapper of it is not on the stack any more.

    Examples
    --------
    >>> step_calls()
    []
    """
    frame: FrameType | None = sys._getframe()
    found: list[Optimizer] = []
    while frame is not None:
        if "wrapper" in frame.f_code.co_name and frame.f_globals is vars(torch_optimizer):
            optimizer = frame.f_locals.get("self")
            if isinstance(optimizer, Optimizer):
                found.append(optimizer)
        frame = frame.f_back
    return found
