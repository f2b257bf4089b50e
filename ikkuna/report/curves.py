"""Charts of curves as SVG, with their numbers for the hover."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.quantity import NEUTRAL, Quantity

__all__ = [
    "ReportChart",
    "ReportCurve",
    "draw_chart",
    "reduced_curve",
    "reduced_matrix",
    "sparkline",
    "tick_label",
    "ticks",
]


def reduced_curve(
    steps: NDArray[np.int64], values: NDArray[np.float64], points: int = 400
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return at most `points` points of a curve.

    Each part keeps its smallest and its largest value, or the first value that is not finite.

    Examples
    --------
    >>> steps, values = reduced_curve(np.arange(1000), np.sin(np.arange(1000)), 10)
    >>> len(steps), float(values.max().round(3))
    (10, 1.0)
    """
    if len(steps) <= points:
        return steps, values
    edges = np.linspace(0, len(steps), max(points // 2, 1) + 1).astype(int)
    begins, ends = edges[:-1, None], edges[1:, None]
    inside = np.minimum(begins + np.arange((ends - begins).max()), ends - 1)  # (parts, values of a part)
    parts = values[inside]
    is_bad = ~np.isfinite(parts)
    has_bad = is_bad.any(axis=1)
    first = np.where(has_bad, 0, np.where(is_bad, np.inf, parts).argmin(axis=1))
    second = np.where(has_bad, is_bad.argmax(axis=1), np.where(is_bad, -np.inf, parts).argmax(axis=1))
    places = np.unique(edges[:-1] + np.stack([first, second]))
    return steps[places], values[places]


def reduced_matrix(
    steps: NDArray[np.int64], values: NDArray[np.float64], present: NDArray[np.bool_], columns: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return a matrix with at most `columns` columns: means of neighbouring steps, without the missing values.

    A mean of values of which one is not finite is NaN, so that a single NaN stays visible.

    Parameters
    ----------
    steps : ndarray (steps,)
        The steps.
    values : ndarray (rows, steps)
        The values.
    present : ndarray (rows, steps)
        Which values are there.
    columns : int
        The largest number of columns.
    """
    if len(steps) <= columns:
        return steps, values, present
    edges = np.linspace(0, len(steps), columns + 1).astype(int)[:-1]
    with np.errstate(all="ignore"):
        total = np.add.reduceat(np.where(present, values, 0.0), edges, axis=1)
        count = np.add.reduceat(present.astype(np.int64), edges, axis=1)
        means = total / count
    means[~np.isfinite(means)] = np.nan
    return steps[edges], means, count > 0


_WIDTH, _HEIGHT = 520, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 8, 22
_COLOURS = 8  # classes c0 to c7 of the style sheet


class ReportCurve(NamedTuple):
    """A curve of a chart.

    Parameters
    ----------
    name : str
        Its name in the legend.
    steps, values : ndarray (values,)
        Its points.
    colour : int
        The number of its colour.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    colour: int = 0


class ReportChart(NamedTuple):
    """A drawn chart: title, SVG, legend, the numbers for the hover, and whether values that are not finite are marked."""

    title: str
    svg: str
    legend: list[tuple[str, int]]
    data: dict[str, Any]
    nonfinite: bool


class _Axis(NamedTuple):
    """Maps values to positions."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def places(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(all="ignore"):
            if self.is_log:
                share = np.log(values / self.low) / math.log(self.high / self.low)
            else:
                share = (values - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def ticks(low: float, high: float, is_log: bool = False, count: int = 4) -> list[float]:
    """Return round numbers from `low` to `high`.

    Examples
    --------
    >>> ticks(0.0, 1.0), ticks(0.01, 50.0, is_log=True), ticks(0.03, 0.9, is_log=True)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.01, 0.1, 1.0, 10.0], [0.05, 0.1, 0.2, 0.5])
    """
    if is_log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        every = max(1, math.ceil((last - first + 1) / (count + 1)))
        found = [10.0**power for power in range(first, last + 1, every)]
        if len(found) > 2:
            return found
        finer = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
        finer = [float(f"{value:.6g}") for value in finer if low <= value <= high]
        return finer if len(finer) > 1 else [value for value in ticks(low, high, count=count) if value > 0]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    return [round(i * size, 12) for i in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def tick_label(value: float) -> str:
    """Return a number that fits beside an axis; large ones in thousands (k), millions (M) or thousands of millions (G).

    Examples
    --------
    >>> tick_label(0.05), tick_label(2500.0), tick_label(413_500_000.0), tick_label(-2e13)
    ('0.05', '2500', '413.5M', '-2e+13')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if max(size, 1e4) <= abs(value) < 1000 * size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _limits(curves: Sequence[ReportCurve], is_log: bool, unit: bool) -> tuple[float, float]:
    if unit:
        return 0.0, 1.0
    values = np.concatenate([curve.values for curve in curves] or [np.empty(0)])
    values = np.clip(values[np.isfinite(values)], -1e100, 1e100)
    if is_log:
        values = values[values > 1e-100]
    if not len(values):
        return (0.1, 1.0) if is_log else (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if is_log:
        low = max(low, high * 1e-12)
        return (low, high) if high > 1.01 * low else (low / 2, high * 2)
    margin = 0.05 * (high - low) or abs(high) * 0.1
    margin = margin if margin > 1e-100 else 1.0
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def draw_chart(
    title: str,
    curves: Sequence[ReportCurve],
    *,
    quantity: Quantity = NEUTRAL,
    band: bool = False,
    steps: tuple[int, int] | None = None,
) -> ReportChart:
    """Draw curves over steps.

    Parameters
    ----------
    title : str
        The title.
    curves : sequence of ReportCurve
        The curves.
    quantity : Quantity
        What the values are: their unit stands in the title, a logarithmic scale leaves out values that are not positive,
        and the scale of shares is [0, 1].
    band : bool
        Whether the area between the first and the last curve, and that between the second and the last but one, are filled.
    steps : (int, int), optional
        The limits of the axis of steps.
    """
    reduced = [ReportCurve(each.name, *reduced_curve(each.steps, each.values), each.colour) for each in curves]
    is_log = quantity.scale == "log"
    low, high = _limits(reduced, is_log, quantity.scale == "share")
    first, last = steps or _step_limits(reduced)
    x = _Axis(first, last if last > first else first + 1, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(low, high, _HEIGHT - _BOTTOM, _TOP, is_log)
    parts: list[str] = []
    if band:
        for outer in range(len(reduced) // 2):
            parts.append(_area(reduced[outer], reduced[-1 - outer], x, y))
    middle = len(reduced) // 2
    parts += [_line(curve, x, y, band and number != middle) for number, curve in enumerate(reduced)]
    data = {
        "x": [x.low, x.high, x.begin, x.end],
        "curves": [
            {
                "name": curve.name,
                "colour": curve.colour,
                "steps": curve.steps.tolist(),
                "values": _rounded(curve.values),
            }
            for curve in reduced
        ],
    }
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM + 1
    has_values = any(np.isfinite(y.places(curve.values)).any() for curve in reduced)
    plot = (
        f'<svg class="plot" x="{_LEFT}" y="0" width="{width}" height="{height}" viewBox="{_LEFT} 0 {width} {height}" '
        f'preserveAspectRatio="none">{"".join(parts)}</svg>'
    )
    cursor = f'<rect class="frame"/><line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    svg = (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f'{"".join(_value_grid(y)) if has_values else _empty(curves)}<g class="steps">{"".join(_step_ticks(x))}</g>{plot}{cursor}</svg>'
    )
    legend = [(curve.name, curve.colour % _COLOURS) for curve in curves]
    return ReportChart(
        quantity.label(title), svg, legend, data, any(not np.isfinite(curve.values).all() for curve in reduced)
    )


def _step_limits(curves: Sequence[ReportCurve]) -> tuple[int, int]:
    found = [curve.steps for curve in curves if len(curve.steps)]
    return (int(min(s[0] for s in found)), int(max(s[-1] for s in found))) if found else (0, 1)


def _value_grid(y: _Axis) -> list[str]:
    parts = []
    for value in ticks(y.low, y.high, y.is_log):
        place = float(y.places(np.array([value]))[0])
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 5}" y="{place + 3.5:.1f}" text-anchor="end">{tick_label(value)}</text>'
        )
    return parts


def _empty(curves: Sequence[ReportCurve]) -> str:
    """Return what stands in a chart without points."""
    values = np.concatenate([curve.values for curve in curves] or [np.empty(0)])
    text = "no positive value" if np.isfinite(values).any() else "no finite value" if len(values) else "no value"
    return f'<text class="tick" x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT / 2}" text-anchor="middle">{text}</text>'


def _step_ticks(x: _Axis) -> list[str]:
    parts = []
    for value in ticks(x.low, x.high, count=5):
        if value == int(value):
            place = float(x.places(np.array([value]))[0])
            anchor = "end" if place > _WIDTH - 30 else "middle"
            parts.append(
                f'<text class="tick" x="{place:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{int(value)}</text>'
            )
    return parts


def _points(
    curve: ReportCurve, x: _Axis, y: _Axis
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    places = y.places(curve.values)
    is_drawn = np.isfinite(curve.values) & np.isfinite(places)
    return (
        x.places(curve.steps.astype(float)),
        np.clip(np.nan_to_num(places), _TOP - 1, _HEIGHT - _BOTTOM + 1),
        is_drawn,
    )


def _line(curve: ReportCurve, x: _Axis, y: _Axis, is_faint: bool = False) -> str:
    """Return the path of a curve, with gaps and red marks where values are not finite."""
    across, up, is_drawn = _points(curve, x, y)
    path, pen = [], "M"
    for px, py, drawn in zip(across.tolist(), up.tolist(), is_drawn.tolist(), strict=True):
        path.append(f"{pen}{px:.1f} {py:.1f}" if drawn else "")
        pen = "L" if drawn else "M"
    bad = across[~np.isfinite(curve.values)].tolist()
    marks = "".join(f'<line class="bad" x1="{px:.1f}" x2="{px:.1f}" y1="{_TOP}" y2="{_TOP + 8}"/>' for px in bad[:50])
    apart = np.pad(~is_drawn, 1, constant_values=True)
    is_alone = is_drawn & apart[:-2] & apart[2:]  # a line of one point would be invisible
    colour = f"c{curve.colour % _COLOURS}"
    dots = "".join(
        f'<circle class="{colour} dot" cx="{px:.1f}" cy="{py:.1f}" r="2.5"/>'
        for px, py in zip(across[is_alone].tolist(), up[is_alone].tolist(), strict=True)
    )
    faint = " faint" if is_faint else ""
    return f'<path class="line {colour}{faint}" d="{"".join(path)}"/>{marks}{dots}'


def _area(low: ReportCurve, high: ReportCurve, x: _Axis, y: _Axis) -> str:
    """Return the filled area between two curves."""
    bottom, top = _points(low, x, y), _points(high, x, y)
    first = [f"{px:.1f} {py:.1f}" for px, py, drawn in zip(*bottom, strict=True) if drawn]
    second = [f"{px:.1f} {py:.1f}" for px, py, drawn in zip(*top, strict=True) if drawn]
    if not first or not second:
        return ""
    return f'<path class="area c{low.colour % _COLOURS}" d="M{"L".join(first)}L{"L".join(reversed(second))}Z"/>'


def _rounded(values: NDArray[np.float64]) -> list[float | str]:
    """Return numbers with five digits; NaN and infinities as text, because JSON has none."""
    return [float(f"{value:.5g}") if math.isfinite(value) else repr(value) for value in values.tolist()]


def sparkline(values: NDArray[np.float64], is_log: bool, points: int = 24) -> str:
    """Return the points of a small curve, 80 wide and 18 high, for an SVG ``polyline``; empty without finite values.

    Examples
    --------
    >>> sparkline(np.array([0.0, 1.0]), is_log=False)
    '0,17 80,1'
    """
    _, values = reduced_curve(np.arange(len(values)), values, points)
    with np.errstate(all="ignore"):
        heights = np.log(values) if is_log else values.astype(float)
    is_drawn = np.isfinite(heights)
    if not is_drawn.any():
        return ""
    low, high = float(heights[is_drawn].min()), float(heights[is_drawn].max())
    up = np.where(is_drawn, 17 - 16 * (heights - low) / (high - low if high > low else 1.0), 0).round().astype(int)
    across = np.linspace(0, 80, len(values)).round().astype(int) if len(values) > 1 else np.array([40])
    return " ".join([f"{x},{y}" for x, y in zip(across[is_drawn].tolist(), up[is_drawn].tolist(), strict=True)])
