"""Makes compiled programs of this process run eagerly for a while."""

from contextlib import AbstractContextManager

import torch

__all__ = ["CompilerStance"]


class CompilerStance:
    """Sets the stance of ``torch.compile`` to ``"force_eager"``, and restores the user's choice.

    Examples
    --------
    >>> stance = CompilerStance()
    >>> stance.set_eager(True)
    >>> stance.set_eager(False)
    """

    def __init__(self) -> None:
        self._eager: AbstractContextManager[object] | None = None

    def set_eager(self, eager: bool) -> None:
        """Run compiled programs eagerly from now on, or no longer; a repeated call does nothing."""
        if eager and self._eager is None:
            self._eager = torch.compiler.set_stance("force_eager")
        elif not eager and self._eager is not None:
            stance, self._eager = self._eager, None
            stance.__exit__(None, None, None)
