"""Pictures in a notebook: shown once, replaced in place when they are drawn anew."""

import logging
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

__all__ = ["Screen", "Sheet", "in_notebook"]

log = logging.getLogger("ikkuna")


class Sheet:
    """A drawn picture; a notebook shows it.

    Parameters
    ----------
    name : what is on it
    png : encoded as PNG, empty before it is drawn
    """

    def __init__(self, name: str, png: bytes = b"") -> None:
        self.name = name
        self.png = png

    def _repr_png_(self) -> bytes | None:
        return self.png or None

    def __repr__(self) -> str:
        return f"<picture of {self.name}>" if self.png else f"<picture of {self.name}, about to be drawn>"


class Screen:
    """The place of one picture in a notebook's output, which :meth:`show` fills again and again.

    It is reserved by the thread that runs a cell, so that it belongs to that cell; any thread may fill it.

    Parameters
    ----------
    sheet : shown at once

    Raises
    ------
    ImportError
        Outside IPython.
    """

    def __init__(self, sheet: Sheet) -> None:
        from IPython.display import display

        self._display: Callable[..., object] = display
        self._id = uuid4().hex
        display(sheet, display_id=self._id)

    def show(self, sheet: Sheet) -> None:
        """Replace what is shown."""
        self._display(sheet, display_id=self._id, update=True)


def in_notebook() -> bool:
    """Whether this is a notebook's kernel; in a plain interpreter nothing is imported to find out.

    Examples
    --------
    >>> in_notebook()
    False
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
