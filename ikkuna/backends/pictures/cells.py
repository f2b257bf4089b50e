"""Draws heat maps and matrices: cells in colours, their labels and a legend.

Pillow draws them in some milliseconds; matplotlib takes seven times as long, and a third of a second to be imported.
"""

import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from ikkuna.backends.pictures.heatmap import HeatmapView
from ikkuna.store.quantity import Quantity

_FONT_SIZE = 15  # pixels; readable where TensorBoard shrinks the picture to the width of a card


@cache
def _font(size: int = _FONT_SIZE) -> ImageFont.FreeTypeFont:
    """Return the font that matplotlib uses too; if matplotlib does not hold it, Pillow looks for it in the system's fonts."""
    package = find_spec("matplotlib")  # not imported
    [folder] = package.submodule_search_locations or [""] if package is not None else [""]
    path = Path(folder, "mpl-data/fonts/ttf/DejaVuSans.ttf")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _is_known(character: str) -> bool:
    """Return whether the font has a character; it draws all others alike."""
    return bytes(_font().getmask(character)) != bytes(_font().getmask("\uffff"))


def printable(text: str, limit: int = 44) -> str:
    r"""Return `text` without control characters and characters that the font lacks, cut to `limit` characters.

    Examples
    --------
    >>> printable("two\nlines"), printable("encoder.layers.0.attention", 12)
    ('two·lines', '…0.attention')
    """
    text = text if len(text) <= limit else f"…{text[1 - limit :]}"
    return "".join(c if c.isprintable() and _is_known(c) else "·" for c in text)


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


LINE = 18
"""Pixels between two labels."""
_LONGEST = 36  # characters of a label
_TEXT = "#282828"


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
        self.is_rotated = is_horizontal and max(map(len, names)) > 15
        widths = [text_width(label) for _, label in self._every(LINE / size)]
        needed = max(widths) + 10 if is_horizontal and not self.is_rotated else LINE
        self._spacing = needed / size
        self.length = max(widths) if self.is_rotated or not is_horizontal else LINE

    def _every(self, spacing: float) -> Iterable[tuple[int, str]]:
        places = range(0, len(self._names), math.ceil(spacing))
        return [(place, printable(self._names[place], _LONGEST)) for place in places]

    def shown(self) -> Iterable[tuple[int, str]]:
        """Return the cells that are labelled, with their labels."""
        return self._every(self._spacing)


def text_width(text: str) -> int:
    """Return the width of a label in pixels."""
    return math.ceil(_font().getlength(text))


class Canvas:
    """A picture in which places are given in pixels from the upper left corner.

    Parameters
    ----------
    width, height : int
        Its size.
    dpi : float
        The size is multiplied by a hundredth of it.
    """

    def __init__(self, width: int, height: int, dpi: float = 100.0) -> None:
        self._scale = dpi / 100
        self.picture = Image.new("RGB", (self._scaled(width), self._scaled(height)), "white")
        self._draw = ImageDraw.Draw(self.picture)

    def _scaled(self, pixels: float) -> int:
        return max(1, round(pixels * self._scale))

    def add_image(self, colours: NDArray[np.uint8], place: tuple[int, int, int, int]) -> None:
        """Add an image (row, column, colour) that fills the pixels from the left and upper ends to the right and lower ones."""
        x0, y0, x1, y1 = map(self._scaled, place)
        self.picture.paste(Image.fromarray(colours).resize((x1 - x0, y1 - y0), Image.Resampling.NEAREST), (x0, y0))

    def add_text(self, x: float, y: float, text: str, anchor: str = "la", is_rotated: bool = False) -> None:
        """Add a text; `anchor` is Pillow's name of the place in it that lies at (x, y)."""
        place, font = (self._scaled(x), self._scaled(y)), _font(self._scaled(_FONT_SIZE))
        if not is_rotated:
            self._draw.text(place, text, _TEXT, font, anchor)
            return
        mask = Image.new("L", (self._scaled(text_width(text) + 1), self._scaled(LINE)))
        ImageDraw.Draw(mask).text((0, 0), text, 255, font)
        mask = mask.transpose(Image.Transpose.ROTATE_90)
        self.picture.paste(_TEXT, (place[0] - mask.width // 2, place[1]), mask)


def encode_png(picture: Image.Image) -> bytes:
    """Return the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=2)  # 5 times faster than 6
    return buffer.getvalue()


_WIDTH = 400  # pixels of the body, about
_HEIGHT = 260  # pixels of the body, at most: with the legend, about the shape of a card
_MOST_ROWS = 105
_BAR = 120  # pixels of the colour bar
_LEGEND = ((ZERO, "exactly 0"), (NONFINITE, "NaN or Inf"), (MISSING, "no value"))

Values = NDArray[np.float64]
Known = NDArray[np.bool_]


def draw_heatmap(view: HeatmapView) -> Image.Image:
    """Return the picture of a heat map, with a row for each module and a column for each step, and a legend below.

    The declaration of the kind decides the scale, see `ColourScale`.
    Zero, numbers that are not finite, and missing values have colours of their own.
    Of more than 105 modules, neighbours share a row, see `grouped`.
    """
    names, values, known = grouped(view)
    scale = ColourScale.of(view.quantity, values[known])
    indices = scale.indices(values)
    indices[~known] = MISSING
    cell = max(1, round(_WIDTH / len(view.steps))), max(2, min(24, _HEIGHT // len(names)))
    return _draw_cells(names, [str(step) for step in view.steps], indices, cell, scale, palette(view.quantity), "step")


def draw_matrix(
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    limits: tuple[float, float] | None = None,
    title: str = "",
    dpi: float = 100.0,
) -> Image.Image:
    """Return the picture of a matrix, its first row on top, with a legend below.

    Rows and columns are labelled where there is space.
    Zero and numbers that are not finite have colours of their own, as in a heat map.
    The scale is linear between `limits`; without limits it is logarithmic where :func:`is_logarithmic` says so.

    Parameters
    ----------
    values : ndarray
        (row, column); neither is empty.
    rows, columns : sequence of str
        Names.
    limits : (float, float), optional
        Ends of the scale.
    title : str
        Text above the picture.
    dpi : float
        The size is multiplied by a hundredth of it.
    """
    finite = values[np.isfinite(values) & (values != 0)]
    is_log = finite.size and (values[np.isfinite(values)] >= 0).all() and is_logarithmic(finite.min(), finite.max())
    quantity = Quantity(scale="log" if is_log else "linear")
    scale = ColourScale.of(quantity, values) if limits is None else ColourScale("linear", *limits)
    height = max(1, min(24, 420 // len(rows)))
    cell = max(1, max(512, len(rows) * height * 5 // 4) // len(columns)), height
    return _draw_cells(rows, columns, scale.indices(values), cell, scale, palette(quantity), title=title, dpi=dpi)


def _draw_cells(
    rows: Sequence[str],
    columns: Sequence[str],
    indices: NDArray[np.uint8],
    cell: tuple[int, int],
    scale: ColourScale,
    colours: NDArray[np.uint8],
    corner: str = "",
    title: str = "",
    dpi: float = 100.0,
) -> Image.Image:
    """Return a picture of cells in colours, of some width and height in pixels, with labels and a legend."""
    width, height = cell
    row_labels, column_labels = Labels(rows, height), Labels(columns, width, is_horizontal=True)
    left, top = max(row_labels.length, text_width(corner)) + 12, 34 if title else 10
    right, bottom = left + width * len(columns), top + height * len(rows)
    end = bottom + max(column_labels.length, LINE)
    canvas = Canvas(max(right, left + _WIDTH) + 24, end + LINE + 34, dpi)
    canvas.add_image(colours[indices], (left, top, right, bottom))
    for row, label in row_labels.shown():
        canvas.add_text(left - 5, top + (row + 0.5) * height, label, "rm")
    for column, label in column_labels.shown():
        canvas.add_text(left + (column + 0.5) * width, bottom + 5, label, "ma", column_labels.is_rotated)
    canvas.add_text(left - 5, bottom + 5, corner, "ra")
    canvas.add_text(left, 8, printable(title))
    _add_legend(canvas, end + 12, scale, colours, indices)
    return canvas.picture


def _add_legend(
    canvas: Canvas, y: int, scale: ColourScale, colours: NDArray[np.uint8], indices: NDArray[np.uint8]
) -> None:
    """Add a colour bar with its ends, and below it a square for each special colour that occurs."""
    x = 12
    ends = (
        f"{'≤ ' if scale.is_cut else ''}{scale.low:.3g}",
        f"{scale.high:.3g}" + (" (log)" if scale.type == "log" else ""),
    )
    canvas.add_text(x, y + 6, ends[0], "lm")
    x += text_width(ends[0]) + 6
    canvas.add_image(colours[np.arange(COLOURS)[None]], (x, y, x + _BAR, y + 12))
    canvas.add_text(x + _BAR + 6, y + 6, ends[1], "lm")
    x, y = 12, y + LINE + 4
    for number, text in _LEGEND:
        if (indices == number).any():
            canvas.add_image(colours[[[number]]], (x, y, x + 12, y + 12))
            canvas.add_text(x + 17, y + 6, text, "lm")
            x += text_width(text) + 32


def grouped(view: HeatmapView, most: int = _MOST_ROWS) -> tuple[tuple[str, ...], Values, Known]:
    """Return names, values and which of them are known, of at most `most` rows.

    Each row then stands for a group of neighbouring modules: it is NaN if one of them is not finite; otherwise the largest of
    shares, the signed number with the largest magnitude, or the median of other numbers, which is 0 if one of them is 0.

    Examples
    --------
    >>> from ikkuna.store.quantity import Quantity
    >>> values = np.array([[1.0], [0.0], [3.0], [5.0]], np.float32)
    >>> names, values, known = grouped(HeatmapView(("a", "b", "c", "d"), (0,), values, np.ones((4, 1), bool), Quantity(scale="log")), 2)
    >>> names, values.tolist()
    (('a … +1', 'c … +1'), [[0.0], [4.0]])
    """
    values = view.values.astype(np.float64)
    if len(view.names) <= most:
        return view.names, values, view.known
    parts = np.array_split(np.arange(len(view.names)), most)
    names = tuple(
        f"{view.names[part[0]]} … +{len(part) - 1}" if len(part) > 1 else view.names[part[0]] for part in parts
    )
    known = np.stack([view.known[part].any(axis=0) for part in parts])
    return names, np.stack([_merged(values[part], view.known[part], view.quantity.scale) for part in parts]), known


def _merged(values: Values, known: Known, type_name: str) -> Values:
    broken = (known & ~np.isfinite(values)).any(axis=0)
    there = np.where(known & np.isfinite(values), values, 0.0)
    largest = np.take_along_axis(there, np.abs(there).argmax(axis=0)[None], axis=0)[0]
    if type_name in ("log", "linear"):
        usable = known.any(axis=0) & ~broken
        median = np.zeros(values.shape[1])
        median[usable] = np.nanmedian(np.where(known, values, np.nan)[:, usable], axis=0)
        largest = np.where((known & (values == 0)).any(axis=0), 0.0, median)
    return np.where(broken, math.nan, largest)
