"""A picture in which places are given in pixels, and the labels of its rows and columns."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.image import BboxImage
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox, TransformedBbox
from numpy.typing import NDArray

from ikkuna.plot.figure import NotebookFigure
from ikkuna.visualization.pictures.labels import printable

__all__ = ["LINE", "Canvas", "Labels", "text_width"]

_DPI = 100
_FONT_SIZE = 8
LINE = 18
"""Pixels between two labels."""
_LONGEST = 36  # characters of a label


class Labels:
    """The labels of rows or columns, as many as there is space for.

    Parameters
    ----------
    names : sequence of str
        One for each cell.
    size : int
        Pixels from one cell to the next.
    font_size : float
        In points.
    is_horizontal : bool
        Whether the cells stand beside each other; their labels are rotated if they are long.
    """

    def __init__(
        self, names: Sequence[str], size: int, is_horizontal: bool = False, font_size: float = _FONT_SIZE
    ) -> None:
        self._names = names
        is_rotated = is_horizontal and max(map(len, names)) > 15
        self.rotation = 90 if is_rotated else 0
        widths = [text_width(label, font_size) for _, label in self._every(LINE / size)]
        needed = max(widths) + 10 if is_horizontal and not is_rotated else LINE
        self._spacing = needed / size
        self.length = max(widths) if is_rotated or not is_horizontal else LINE

    def _every(self, spacing: float) -> Iterable[tuple[int, str]]:
        places = range(0, len(self._names), math.ceil(spacing))
        return [(place, printable(self._names[place], _LONGEST)) for place in places]

    def shown(self) -> Iterable[tuple[int, str]]:
        """Return the cells that are labelled, with their labels."""
        return self._every(self._spacing)


def text_width(text: str, size: float = _FONT_SIZE) -> float:
    """Return the width of a label in pixels."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width) * _DPI / 72


class Canvas:
    """A picture in which places are given in pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._size = math.ceil(width), math.ceil(height)
        self.picture = NotebookFigure(figsize=(self._size[0] / _DPI, self._size[1] / _DPI), dpi=_DPI)

    def add_image(self, colours: NDArray[np.uint8], place: Bbox) -> None:
        """Add an image (row, column, 4) that fills `place`."""
        width, height = self._size
        share = Bbox.from_extents(place.x0 / width, 1 - place.y1 / height, place.x1 / width, 1 - place.y0 / height)
        image = BboxImage(TransformedBbox(share, self.picture.transFigure), interpolation="nearest")
        image.set_data(colours)
        self.picture.add_artist(image)

    def add_text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Add a text."""
        options = {"fontsize": _FONT_SIZE, "color": "#282828", **options}
        self.picture.text(x / self._size[0], 1 - y / self._size[1], text, parse_math=False, **options)
