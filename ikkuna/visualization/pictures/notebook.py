"""Pictures in a notebook: displayed once, then replaced in place."""

import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

__all__ = ["NotebookDisplay", "PNGPicture", "in_notebook"]


class PNGPicture:
    """A drawn picture that a notebook displays.

    Parameters
    ----------
    name : str
        The picture's name.
    png : bytes
        The picture encoded as PNG; empty before it is drawn.
    """

    def __init__(self, name: str, png: bytes = b"") -> None:
        self.name = name
        self.png = png

    def _repr_png_(self) -> bytes | None:
        return self.png or None

    def __repr__(self) -> str:
        return f"<picture of {self.name}>" if self.png else f"<picture of {self.name}, not drawn yet>"


class NotebookDisplay:
    """The output of one picture in a notebook.

    The thread that runs a cell makes it, so that it belongs to that cell; any thread may update it.

    Parameters
    ----------
    picture : PNGPicture
        Displayed at once.

    Raises
    ------
    ImportError
        Outside IPython.
    """

    def __init__(self, picture: PNGPicture) -> None:
        from IPython.display import display

        self._display: Callable[..., object] = display
        self._id = uuid4().hex
        display(picture, display_id=self._id)

    def update(self, picture: PNGPicture) -> None:
        """Replace the displayed picture."""
        self._display(picture, display_id=self._id, update=True)


def in_notebook() -> bool:
    """Return whether the process is the kernel of a notebook; does not import IPython.

    Examples
    --------
    >>> in_notebook()
    False
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
