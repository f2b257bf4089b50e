"""Whether compiled programs of this process run as they were compiled, or their Python as it was written."""

from contextlib import AbstractContextManager

import torch

__all__ = ["Stance"]


class Stance:
    """Has compiled programs run eagerly, and puts back what the user had chosen.

    Examples
    --------
    >>> stance = Stance()
    >>> stance.be_eager(True)
    >>> stance.be_eager(False)
    """

    def __init__(self) -> None:
        self._chosen: AbstractContextManager[object] | None = None

    def be_eager(self, eager: bool) -> None:
        """Run eagerly from now on, or no longer; to say the same again does nothing."""
        if eager and self._chosen is None:
            self._chosen = torch.compiler.set_stance("force_eager")
        elif not eager and self._chosen is not None:
            chosen, self._chosen = self._chosen, None
            chosen.__exit__(None, None, None)
