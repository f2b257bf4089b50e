"""Draws a heatmap, a row for each module and a column for each step, and a matrix of modules by modules."""

import io
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.pictures.heatmap import HeatmapView

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

__all__ = ["draw", "draw_matrix", "scaled"]

_VIRIDIS = (0x440154, 0x482878, 0x3E4A89, 0x31688E, 0x26828E, 0x1F9E89, 0x35B779, 0x6DCD59, 0xB4DE2C, 0xFDE725)
_BROKEN = (230, 0, 60)  # NaN and infinities: a colour that the scale does not have
_MISSING = (226, 230, 238)
_LINE = 13  # pixels of height that a label needs
_TOP = 8
_TEXT = (40, 40, 40)


def draw(cells: HeatmapView) -> tuple[bytes, int, int]:
    """Return the picture of a heatmap as a PNG, with its height and width.

    Rows are labelled where there is room for it, the others by what is above them.
    Values that are not finite are red, steps without a value grey.
    A scale is logarithmic where values are positive and span more than a factor of 30.
    """
    shares, ends = scaled(cells)
    height = max(1, min(18, 420 // len(cells.names)))
    return _drawn(
        _coloured(shares, cells.known), cells.names, (f"step {cells.steps[0]}", str(cells.steps[-1])), ends, height
    )


def draw_matrix(matrix: Matrix) -> tuple[bytes, int, int]:
    """Return the picture of a matrix as a PNG, with its height and width; of columns only the outermost are named.

    The scale is linear; values that are not finite are red.
    """
    finite = matrix.values[np.isfinite(matrix.values)]
    ends = matrix.limits or ((float(finite.min()), float(finite.max())) if finite.size else None)
    low, high = ends or (0.0, 1.0)
    values = np.where(np.isfinite(matrix.values), matrix.values, np.nan)
    colours = _coloured((values - low) / (high - low or 1.0), np.ones(values.shape, bool))
    height = max(1, min(40, 420 // len(matrix.rows)))
    return _drawn(colours, matrix.rows, (matrix.columns[0], matrix.columns[-1]), ends, height)


def _drawn(
    colours: NDArray[np.uint8],
    labels: Sequence[str],
    below: tuple[str, str],
    ends: tuple[float, float] | None,
    height: int,
) -> tuple[bytes, int, int]:
    """Return a picture of cells that are `height` pixels high, with `labels` at its rows and two words below it."""
    from PIL import Image, ImageDraw  # comes with matplotlib; nobody waits for its import but the thread that draws

    rows, columns, _ = colours.shape
    width = max(1, max(512, rows * height * 5 // 4) // columns)  # a card of TensorBoard is wider than high
    body = Image.fromarray(colours).resize((columns * width, rows * height), Image.Resampling(0))
    names = _shortened(labels)
    shown = range(0, rows, math.ceil(_LINE / height))
    margin = max(_measure(names[row]) for row in shown) + 8
    size = (margin + body.width + 96, max(body.height, 4 * _LINE) + 2 * _LINE + _TOP)
    picture = Image.new("RGB", size, (255, 255, 255))
    picture.paste(body, (margin, _TOP))
    pen = ImageDraw.Draw(picture)
    for row in shown:
        middle = _TOP + row * height + height // 2
        pen.text((margin - 5, middle), names[row], _TEXT, _font(), anchor="rm")
    foot = _TOP + body.height + 4
    pen.text((margin, foot), below[0], _TEXT, _font())
    pen.text((margin + body.width, foot), below[1], _TEXT, _font(), anchor="ra")
    _add_scale(picture, pen, margin + body.width + 14, ends)
    return _png(picture), picture.height, picture.width


def scaled(cells: HeatmapView) -> tuple[NDArray[np.float64], tuple[float, float] | None]:
    """Return where values lie between the ends of the scale, in [0, 1], and what its ends are.

    NaN stands for what is not finite; without a finite value there are no ends.

    Examples
    --------
    >>> steps, known = (0, 1, 2), np.ones((1, 3), bool)
    >>> scaled(HeatmapView(("fc",), steps, np.array([[1.0, 2.0, 3.0]]), known))
    (array([[0. , 0.5, 1. ]]), (1.0, 3.0))
    >>> scaled(HeatmapView(("fc",), steps, np.array([[0.01, 1.0, 100.0]]), known))
    (array([[0. , 0.5, 1. ]]), (0.01, 100.0))
    """
    values = np.where(np.isfinite(cells.values) & cells.known, cells.values, np.nan).astype(np.float64)
    finite = values[~np.isnan(values)]
    if not finite.size:
        return values, None
    ends = low, high = float(finite.min()), float(finite.max())
    if low == 0 < high:
        low = float(finite[finite > 0].min())  # zeros are shown as the least other value, if that lies far down
    if _is_logarithmic(low, high):
        ends = low, high
        values = np.log(np.maximum(values, low))
        low, high = np.log(ends)
    else:
        low, high = ends
    return (values - low) / (high - low) if high > low else values * 0.0, ends


def _is_logarithmic(low: float, high: float) -> bool:
    return low > 0 and high > 30 * low


def _coloured(shares: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Return ``(row, column, 3)`` colours."""
    place = np.nan_to_num(shares * 255.0).clip(0, 255).astype(np.uint8)
    colours = _palette()[place]
    colours[np.isnan(shares)] = _BROKEN
    colours[~known] = _MISSING
    return colours


@cache
def _palette() -> NDArray[np.uint8]:
    """Return the 256 colours of the scale."""
    anchors = np.array([[c >> 16, c >> 8 & 255, c & 255] for c in _VIRIDIS])
    places = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(places, np.arange(len(anchors)), anchors[:, i]) for i in range(3)]
    return np.stack(channels, -1).round().astype(np.uint8)


def _shortened(names: Sequence[str], limit: int = 36) -> list[str]:
    return [name if len(name) <= limit else f"…{name[1 - limit :]}" for name in names]


def _add_scale(picture: "Image.Image", pen: "ImageDraw.ImageDraw", left: int, ends: tuple[float, float] | None) -> None:
    from PIL import Image

    if ends is None:
        pen.text((left, _TOP), "not finite", _BROKEN, _font())
        return
    height = picture.height - 3 * _LINE - _TOP
    falling = np.linspace(1, 0, height)[:, None].repeat(12, 1)
    picture.paste(Image.fromarray(_coloured(falling, np.ones_like(falling, bool))), (left, _TOP))
    pen.text((left + 17, _TOP), f"{ends[1]:.3g}", _TEXT, _font())
    pen.text((left + 17, _TOP + height), f"{ends[0]:.3g}", _TEXT, _font(), anchor="ls")
    if _is_logarithmic(*ends):
        pen.text((left, _TOP + height + 4), "log scale", _TEXT, _font())


@cache
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(11)


def _measure(text: str) -> int:
    width: float = _font().getlength(text)
    return math.ceil(width)


def _png(picture: "Image.Image") -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=2)  # a third larger, and five times faster
    return file.getvalue()
