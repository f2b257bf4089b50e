"""Heat maps layer × step as SVG, with a picture of one pixel for each value."""

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.report.curves import ticks
from ikkuna.report.png import data_uri
from ikkuna.report.reduction import reduced_matrix
from ikkuna.visualization.pictures.colour_scale import COLOURS, MISSING, NONFINITE, ZERO, ColourScale, palette

__all__ = ["ReportHeatmap", "draw_heatmap"]

_BOTTOM = 20
_PIXELS = 60_000  # values of a picture
_TALLEST = 720


class _Layout(NamedTuple):
    """Width of a heat map, width of the labels of its rows, the longest label, and the number of labels of steps."""

    width: int
    labels: int
    characters: int
    steps: int


_WIDE = _Layout(900, 210, 34, 6)
_NARROW = _Layout(540, 150, 23, 4)


class ReportHeatmap(NamedTuple):
    """A drawn heat map: its title, its SVG, its legend, and the numbers for the hover."""

    title: str
    svg: str
    scale: ColourScale
    specials: list[tuple[str, str]]
    data: dict[str, Any]


def draw_heatmap(
    title: str,
    kind: str,
    names: Sequence[str],
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    present: NDArray[np.bool_],
    scale: ColourScale | None = None,
    is_clear: bool = False,
    is_narrow: bool = False,
) -> ReportHeatmap:
    """Draw the values of the modules of a kind.

    Parameters
    ----------
    title : str
        The title.
    kind : str
        The kind, which decides the scale.
    names : sequence of str
        The names of the rows.
    steps : ndarray (steps,)
        The steps.
    values : ndarray (rows, steps)
        The values.
    present : ndarray (rows, steps)
        Which values are there; a row without values is grey.
    scale : ColourScale, optional
        The scale of colours, for several heat maps with one scale.
    is_clear : bool
        Whether missing values are transparent instead of grey.
    is_narrow : bool
        Whether two heat maps stand side by side.
    """
    layout = _NARROW if is_narrow else _WIDE
    columns = int(np.clip(_PIXELS // max(len(names), 1), 40, 240))
    steps, values, present = reduced_matrix(steps, values, present, columns)
    scale = scale or ColourScale.of(kind, values[present])
    indices = scale.indices(values)
    indices[~present] = MISSING
    colours = palette(kind)
    row = float(np.clip(_TALLEST / max(len(names), 1), 1.0, 15.0))
    height = row * len(names)
    address = data_uri(indices, colours, MISSING if is_clear else None)
    width = layout.width - layout.labels
    picture = (
        f'<svg class="plot" x="{layout.labels}" y="0" width="{width}" height="{height:.1f}" viewBox="0 0 {width} {height:.1f}" '
        f'preserveAspectRatio="none"><image width="{width}" height="{height:.1f}" preserveAspectRatio="none" href="{address}"/></svg>'
    )
    svg = (
        f'<svg class="heatmap" viewBox="0 0 {layout.width} {height + _BOTTOM:.1f}" role="img">{picture}'
        f'<g class="rows">{_row_labels(names, row, layout)}</g><g class="steps">{_step_labels(steps, height, layout)}</g>'
        f'<rect class="frame"/></svg>'
    )
    specials_shown = (ZERO, NONFINITE) if is_clear else (ZERO, NONFINITE, MISSING)
    used = {number for number in specials_shown if (indices == number).any()}
    texts = {ZERO: "exactly zero", NONFINITE: "NaN or infinite", MISSING: "no value"}
    specials = [(texts[number], "#{:02x}{:02x}{:02x}".format(*colours[number].tolist())) for number in sorted(used)]
    data = {
        "names": list(names),
        "steps": steps.tolist(),
        "type": scale.type,
        "low": scale.low,
        "high": scale.high,
        "characters": layout.characters,
        "colours": COLOURS,
    }
    return ReportHeatmap(title, svg, scale, specials, data)


def _row_labels(names: Sequence[str], row: float, layout: _Layout) -> str:
    size = min(11.0, max(row * 0.85, 8.0))
    every = max(1, math.ceil((size + 1) / row))
    parts = [
        f'<text class="row" x="{layout.labels - 6}" y="{(i + 0.5) * row + size * 0.35:.1f}" font-size="{size:.1f}">'
        f"{html.escape(_short(name, layout.characters))}</text>"
        for i, name in enumerate(names)
        if i % every == every // 2
    ]
    return "".join(parts)


def _short(name: str, most: int) -> str:
    """Return a name that fits beside a heat map; the middle of a long one is left out."""
    return name if len(name) <= most else f"{name[: most // 2 - 3]}…{name[-(most // 2 + 2) :]}"


def _step_labels(steps: NDArray[np.int64], height: float, layout: _Layout) -> str:
    if not len(steps):
        return ""
    width = (layout.width - layout.labels) / len(steps)
    first, last = int(steps[0]), int(steps[-1])
    shown = [value for value in ticks(first, last, count=layout.steps) if value == int(value)] if last > first else []
    parts = []
    for value in shown or [first]:
        x = layout.labels + (float(np.interp(value, steps, np.arange(len(steps)))) + 0.5) * width
        anchor = "start" if x < layout.labels + 10 else "end" if x > layout.width - 30 else "middle"
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height + 14:.1f}" text-anchor="{anchor}">{int(value)}</text>')
    return "".join(parts)
