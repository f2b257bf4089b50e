"""The numbers of charts, which uPlot draws in the browser."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.finding import Finding
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.sparkline import reduced_curve

_POINTS = 400  # of a curve


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers from `low` to `high`.

    Examples
    --------
    >>> ticks(0.0, 1.0)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    return [round(i * size, 12) for i in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


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
    """A chart: its title, its kind, and the numbers for uPlot."""

    title: str
    kind: str
    data: dict[str, Any]

    @property
    def is_zero(self) -> bool:
        """Whether every value is 0."""
        return all(value == 0 for curve in self.data["curves"] for value in curve["values"])


def chart_of(
    title: str,
    curves: Sequence[ReportCurve],
    *,
    kind: str = "",
    quantity: Quantity = NEUTRAL,
    is_band: bool = False,
    findings: Sequence[Finding] = (),
    lines: Sequence[tuple[float, str]] = (),
    within: tuple[float, float] = (-math.inf, math.inf),
) -> ReportChart:
    """Return the chart of curves over steps.

    A logarithmic scale that has values which are not positive is linear around 0, so that every finite value has a place.

    Parameters
    ----------
    title : str
        The title.
    curves : sequence of ReportCurve
        The curves.
    kind : str
        The kind, which findings refer to.
    quantity : Quantity
        What the values are.
    is_band : bool
        Whether the areas between the first and the last curve, the second and the last but one, and so on, are filled.
    findings : sequence of Finding
        They are marked at their steps; those of this kind show the healthy range of its values.
    lines : sequence of (float, str)
        Values that are marked by a line with a label, such as the loss of a guess.
    within : (float, float)
        The steps to show.

    Examples
    --------
    >>> found = chart_of("loss", [ReportCurve("", np.arange(3), np.array([1.0, np.nan, 0.0]))], quantity=Quantity("nats", scale="log"))
    >>> found.title, found.data["scale"], found.data["curves"][0]["values"]
    ('loss [nats]', 'asinh', [1.0, 'nan', 0.0])
    """
    shown = []
    for curve in curves:
        begin, end = np.searchsorted(curve.steps, [within[0], within[1]], "left").tolist()
        part = slice(max(begin - 1, 0), end + 1)  # a point on either side, so that the lines reach the edges
        shown.append(
            ReportCurve(curve.name, *reduced_curve(curve.steps[part], curve.values[part], _POINTS), curve.colour)
        )
    values = np.concatenate([each.values for each in shown] or [np.empty(0)])
    finite = values[np.isfinite(values)]
    sizes = np.abs(finite[finite != 0])
    scale = quantity.scale
    if scale == "log" and not (finite > 0).all():
        scale = "asinh"
    data: dict[str, Any] = {
        "scale": scale,
        "least": float(sizes.min(initial=1.0)) if len(sizes) else 1.0,
        "band": is_band,
        "curves": [
            {
                "name": each.name,
                "colour": each.colour % 8,
                "steps": each.steps.tolist(),
                # five digits; NaN and infinities as text, because JSON has none
                "values": [float(f"{x:.5g}") if math.isfinite(x) else repr(x) for x in each.values.tolist()],
            }
            for each in shown
        ],
        "lines": [[value, label] for value, label in lines],
        "marks": [[f.step, f.head, f.severity] for f in findings if f.step is not None],
        "healthy": next((limits for f in findings if (limits := healthy_limits(f, kind)) is not None), None),
    }
    return ReportChart(quantity.label(title), kind, data)


def healthy_limits(finding: Finding, kind: str) -> list[float | None] | None:
    """Return the healthy range of the values of a kind, with ``None`` for an open end.

    It is ``None`` if the finding judges something else than these values themselves.

    Examples
    --------
    >>> dead = Finding("dead", "error", "", kind="share", value=0.97, limits=(-math.inf, 0.9), evidence=((0, 0.1), (1, 0.97)))
    >>> healthy_limits(dead, "share"), healthy_limits(dead, "loss")
    ([None, 0.9], None)
    """
    if finding.limits is None or finding.kind != kind or finding.value is None:
        return None
    if not any(math.isclose(value, finding.value, rel_tol=1e-6) for _, value in finding.evidence):
        return None  # the figure is a function of the values
    return [limit if math.isfinite(limit) else None for limit in finding.limits]


def _numbers(chart: ReportChart) -> list[tuple[list[int], list[float | str]]]:
    return [(curve["steps"], curve["values"]) for curve in chart.data["curves"]]


def folded(charts: Sequence[ReportChart]) -> tuple[list[ReportChart], list[tuple[ReportChart, str]]]:
    """Return the charts with information of their own, and the others with a reason: always zero, or equal to another.

    Examples
    --------
    >>> curves = [ReportCurve("", np.arange(2), np.array(values)) for values in ([1.0, 2.0], [0.0, 0.0], [1.0, 2.0])]
    >>> shown, others = folded([chart_of(name, [curve]) for name, curve in zip("abc", curves)])
    >>> [chart.title for chart in shown], [(chart.title, why) for chart, why in others]
    (['a'], [('b', 'always 0'), ('c', 'equal to a')])
    """
    shown: list[ReportChart] = []
    others: list[tuple[ReportChart, str]] = []
    for chart in charts:
        numbers = _numbers(chart)
        varies = any(len(set(values)) > 1 for _, values in numbers)  # two constants are equal by chance
        same = next((s for s in shown if varies and _numbers(s) == numbers), None)
        if chart.is_zero:
            others.append((chart, "always 0"))
        elif same is not None:
            others.append((chart, f"equal to {same.title}"))
        else:
            shown.append(chart)
    return shown, others
