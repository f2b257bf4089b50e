"""Pictures in pixels, their texts, scales and colours."""

import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import BboxImage
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox, TransformedBbox
from numpy.typing import NDArray

from ikkuna.figures.style import NotebookFigure
from ikkuna.store.quantity import Quantity


def printable(text: str, limit: int = 44) -> str:
    r"""Return `text` without control characters and characters that the font lacks, cut to `limit` characters.

    Examples
    --------
    >>> printable("two\nlines"), printable("encoder.layers.0.attention", 12)
    ('two·lines', '…0.attention')
    """
    text = text if len(text) <= limit else f"…{text[1 - limit :]}"
    known = _characters()
    return "".join(c if c.isprintable() and ord(c) in known else "·" for c in text)


def escaped(text: str, limit: int = 44) -> str:
    r"""Return :func:`printable` text that matplotlib shows in titles and legends letter by letter.

    Matplotlib reads a formula between dollar signs, and leaves out of legends what begins with an underscore.

    Examples
    --------
    >>> escaped("a$b$"), escaped("_private")
    ('a\\$b\\$', ' _private')
    """
    shown = printable(text, limit).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _characters() -> frozenset[int]:
    """Return the characters of matplotlib's own font; every other font may lack one, and matplotlib would warn."""
    path = font_manager.findfont("DejaVu Sans")
    return frozenset(font_manager.get_font(path).get_charmap())


_LARGEST_LIMIT = 1e100  # the square of a limit of an axis must not overflow
_LEAST_LIMIT = 1e-100


def is_logarithmic(low: float, high: float) -> bool:
    """Return whether the scale of values from `low` to `high` is logarithmic.

    It is if they are positive and span more than a factor of 100.

    Examples
    --------
    >>> is_logarithmic(0.001, 1.0), is_logarithmic(0.1, 1.0), is_logarithmic(0.0, 1.0)
    (True, False, False)
    """
    return low >= _LEAST_LIMIT and high > 100 * low


def bounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `values`, cut to ±1e100."""
    return np.clip(values, -_LARGEST_LIMIT, _LARGEST_LIMIT)


def encode_png(picture: Figure, dpi: float = 100.0) -> bytes:
    """Return the picture as PNG, and clear it."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 2})  # 5 times faster than 6
    picture.clear()  # its parts refer to each other, and the user may have disabled the garbage collector
    return buffer.getvalue()


COLOURS = 240
"""The number of colours of values; the numbers of the special colours follow."""
ZERO, NONFINITE, MISSING = COLOURS, COLOURS + 1, COLOURS + 2
_SPECIAL = ((255, 154, 213), (227, 0, 43), (168, 168, 168))
_HEALTHY_ZERO = (140, 178, 152)  # where a zero is good; calm on a light and on a dark page
_SEQUENTIAL = (
    *((68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142)),
    *((31, 158, 137), (53, 183, 121), (109, 205, 89), (180, 222, 44), (253, 231, 37)),
)
_DIVERGING = ((64, 0, 110), (153, 112, 171), (235, 230, 238), (120, 190, 130), (0, 88, 40))
_DECADES = 12
_LEAST, _LARGEST = 1e-100, 1e100  # quotients of these are no overflow


def palette(quantity: Quantity) -> NDArray[np.uint8]:
    """Return the colours of a kind: those of values, and those of zero, of numbers that are not finite, and of missing values."""
    anchors = np.array(_DIVERGING if quantity.scale == "signed" else _SEQUENTIAL, float)
    places = np.linspace(0, len(anchors) - 1, COLOURS)
    values = np.stack([np.interp(places, np.arange(len(anchors)), channel) for channel in anchors.T], axis=1)
    special = (_HEALTHY_ZERO, *_SPECIAL[1:]) if quantity.zero == "good" else _SPECIAL
    return np.concatenate([values.round(), np.array(special)]).astype(np.uint8)


class ColourScale(NamedTuple):
    """The scale of a kind in a run.

    Parameters
    ----------
    type : {'linear', 'log', 'share', 'signed'}
        Shares are drawn on [0, 1], signed numbers symmetrically to 0, and others from the smallest to the largest value,
        if they are declared so by their logarithm.
    low, high : float
        The values of the first and of the last colour.
    is_cut : bool
        Whether there are smaller values, which have the first colour: a logarithmic scale has at most twelve decades.
    """

    type: str
    low: float
    high: float
    is_cut: bool = False

    @classmethod
    def of(cls, quantity: Quantity, values: NDArray[np.float64]) -> "ColourScale":
        """Return the scale for some values.

        Examples
        --------
        >>> ColourScale.of(Quantity(scale="log"), np.array([0.0, 0.1, 10.0, np.nan]))
        ColourScale(type='log', low=0.1, high=10.0, is_cut=False)
        """
        finite = values[np.isfinite(values)]
        if quantity.scale == "share":
            return cls(quantity.scale, 0.0, 1.0)
        if quantity.scale == "linear":
            low, high = np.clip(
                [finite.min(initial=_LARGEST), finite.max(initial=-_LARGEST)], -_LARGEST, _LARGEST
            ).tolist()
            return (
                cls(quantity.scale, low, high)
                if low < high
                else cls(quantity.scale, *_around(low if len(finite) else 0.0))
            )
        size = np.abs(finite)
        size = np.clip(size[size > 0], _LEAST, _LARGEST)
        high = float(size.max(initial=0.0)) or 1.0
        if quantity.scale == "signed":
            return cls(quantity.scale, -high, high)
        least = float(size.min(initial=high))
        low = max(least, high * 10.0**-_DECADES)
        return cls(quantity.scale, low if low < high else high / 10, high, least < low)

    def indices(self, values: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Return the colour of each value; NaN and infinities get the colour of numbers that are not finite."""
        with np.errstate(all="ignore"):
            if self.type == "log":
                place = np.log(np.abs(values) / self.low) / np.log(self.high / self.low)
            else:
                place = (values - self.low) / (self.high - self.low)
            found: NDArray[np.uint8] = (np.clip(np.nan_to_num(place), 0, 1) * (COLOURS - 1)).round().astype(np.uint8)
        found[values == 0] = ZERO
        found[~np.isfinite(values)] = NONFINITE
        return found


def _around(value: float) -> tuple[float, float]:
    """Return a range with one value in its middle."""
    half = abs(value) / 2 or 0.5
    return value - half, value + half


_DPI = 100
_FONT_SIZE = 11  # readable where TensorBoard shrinks the picture to the width of a card
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
    is_horizontal : bool
        Whether the cells stand beside each other; their labels are rotated if they are long.
    """

    def __init__(self, names: Sequence[str], size: int, is_horizontal: bool = False) -> None:
        self._names = names
        is_rotated = is_horizontal and max(map(len, names)) > 15
        self.rotation = 90 if is_rotated else 0
        widths = [text_width(label) for _, label in self._every(LINE / size)]
        needed = max(widths) + 10 if is_horizontal and not is_rotated else LINE
        self._spacing = needed / size
        self.length = max(widths) if is_rotated or not is_horizontal else LINE

    def _every(self, spacing: float) -> Iterable[tuple[int, str]]:
        places = range(0, len(self._names), math.ceil(spacing))
        return [(place, printable(self._names[place], _LONGEST)) for place in places]

    def shown(self) -> Iterable[tuple[int, str]]:
        """Return the cells that are labelled, with their labels."""
        return self._every(self._spacing)


def text_width(text: str) -> float:
    """Return the width of a label in pixels."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=_FONT_SIZE), ismath=False)
    return float(width) * _DPI / 72


class Canvas:
    """A picture in which places are given in pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._size = math.ceil(width), math.ceil(height)
        self.picture = NotebookFigure(figsize=(self._size[0] / _DPI, self._size[1] / _DPI), dpi=_DPI)

    def add_image(self, colours: NDArray[np.uint8], place: Bbox) -> None:
        """Add an image (row, column, colour) that fills `place`."""
        width, height = self._size
        share = Bbox.from_extents(place.x0 / width, 1 - place.y1 / height, place.x1 / width, 1 - place.y0 / height)
        image = BboxImage(TransformedBbox(share, self.picture.transFigure), interpolation="nearest")
        image.set_data(colours)
        self.picture.add_artist(image)

    def add_text(self, x: float, y: float, text: str, **options: Any) -> None:
        """Add a text."""
        options = {"fontsize": _FONT_SIZE, "color": "#282828", **options}
        self.picture.text(x / self._size[0], 1 - y / self._size[1], text, parse_math=False, **options)
