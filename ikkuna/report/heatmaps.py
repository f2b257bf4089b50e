"""Heat maps layer × step as SVG, with a picture of one pixel for each value."""

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import fromarray

from ikkuna.backends.pictures.cells import COLOURS, MISSING, NONFINITE, ZERO, ColourScale, palette
from ikkuna.report.charts import ticks
from ikkuna.store import StoredHistogram, StoredRun
from ikkuna.store.quantity import Quantity
from ikkuna.store.sparkline import reduced_matrix


def data_uri(indices: NDArray[np.uint8], colours: NDArray[np.uint8], clear: int | None = None) -> str:
    """Return a picture with one pixel for each number, as an address that contains it.

    Parameters
    ----------
    indices : ndarray (rows, columns)
        The number of each pixel's colour.
    colours : ndarray (colours, 3)
        Red, green and blue of each colour.
    clear : int, optional
        The number of a colour that is transparent.

    Examples
    --------
    >>> data_uri(np.zeros((1, 1), np.uint8), np.zeros((1, 3), np.uint8))[:32]
    'data:image/png;base64,iVBORw0KGg'
    """
    picture, buffer = fromarray(indices), io.BytesIO()
    picture.putpalette(colours.tobytes())
    picture.save(buffer, "PNG", optimize=True, **({} if clear is None else {"transparency": clear}))
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


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
    """A drawn heat map: title, SVG, legend, whether a value has a colour of the scale, and numbers for the hover."""

    title: str
    svg: str
    scale: ColourScale
    specials: list[tuple[str, str]]
    has_colours: bool
    data: dict[str, Any]


def draw_heatmap(
    title: str,
    quantity: Quantity,
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
    quantity : Quantity
        What the kind is, which decides the scale.
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
    scale = scale or ColourScale.of(quantity, values[present])
    indices = scale.indices(values)
    indices[~present] = MISSING
    colours = palette(quantity)
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
    texts = {
        ZERO: "exactly zero (healthy)" if quantity.zero == "good" else "exactly zero",
        NONFINITE: "NaN or infinite",
        MISSING: "no value",
    }
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
    return ReportHeatmap(title, svg, scale, specials, bool((indices < COLOURS).any()), data)


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


_COUNT = Quantity(scale="log")
_MODULES, _TIMES, _BINS = 8, 60, 32


def rebinned(histogram: StoredHistogram, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of the values of a histogram in each bin; values are spread evenly over their bucket.

    Examples
    --------
    >>> histogram = StoredHistogram(0.0, 2.0, 4.0, 4.0, 5.0, np.array([1.0, 2.0]), np.array([1.0, 3.0]))
    >>> rebinned(histogram, np.array([0.0, 1.0, 2.0])).tolist()
    [0.25, 0.75]
    """
    limits = np.clip(np.concatenate([[histogram.min], histogram.bucket_limits]), histogram.min, histogram.max)
    total = float(histogram.bucket_counts.sum())
    if not total or not np.isfinite(limits).all():
        return np.zeros(len(edges) - 1)
    below = np.concatenate([[0.0], np.cumsum(histogram.bucket_counts)]) / total
    if limits[-1] <= limits[0]:  # all values are equal
        return np.histogram([limits[0]], edges)[0].astype(float)
    kept = np.concatenate([[True], np.diff(limits) > 0])
    return np.diff(np.interp(edges, limits[kept], below[kept], left=0.0, right=1.0))


def distributions_of(run: StoredRun) -> list[ReportHeatmap]:
    """Return a heat map for each kind with histograms and each of at most 8 modules; the largest values are at the top."""
    found = []
    for kind in run.histogram_kinds():
        names = run.histogram_names(kind)
        for name in [names[round(i)] for i in np.linspace(0, len(names) - 1, min(len(names), _MODULES))]:
            if (drawn := _distribution(kind, name, list(run.histograms(kind, name)))) is not None:
                found.append(drawn)
    return found


def _distribution(kind: str, name: str | None, stored: list[tuple[int, Any]]) -> ReportHeatmap | None:
    stored = [pair for pair in stored if np.isfinite([pair[1].min, pair[1].max]).all()]
    if not stored:
        return None
    chosen = [stored[round(i)] for i in np.linspace(0, len(stored) - 1, min(len(stored), _TIMES))]
    low, high = min(h.min for _, h in chosen), max(h.max for _, h in chosen)
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    shares = np.stack([rebinned(histogram, edges) for _, histogram in chosen], axis=1)[::-1]
    labels = [f"{edge:.3g}" for edge in edges[1:][::-1]]
    steps = np.array([step for step, _ in chosen], np.int64)
    scale = ColourScale.of(_COUNT, shares)
    return draw_heatmap(
        f"{kind} · {name or 'network'}", _COUNT, labels, steps, shares, shares > 0, scale, is_clear=True
    )
