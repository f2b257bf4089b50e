"""The data of a picture: a line for each module, quantiles over many modules, histograms, or a matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.matrix import Matrix
from ikkuna.visualization.pictures.curve import Curve
from ikkuna.visualization.pictures.histogram_history import HistogramAtStep, HistogramHistory
from ikkuna.visualization.pictures.quantile_bands import QuantileBands, QuantileView
from ikkuna.visualization.series import Series

__all__ = ["Chart", "ChartView", "HistogramChart", "HistogramsView", "Line", "MatrixChart", "MatrixView", "heading"]


@dataclass(frozen=True, eq=False)
class Line:
    """The curve of a module, or of the network, whose name is ``None``."""

    name: str | None
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ChartView:
    """A copy of a chart: a line for each module, or quantiles if there are too many modules."""

    title: str
    label: str
    ylims: tuple[float, float] | None
    modules: int
    lines: tuple[Line, ...] = ()
    quantiles: QuantileView | None = None


@dataclass(frozen=True, eq=False)
class HistogramsView:
    """A copy of the histograms of some modules; `modules` is the number of all modules."""

    title: str
    label: str
    ylims: tuple[float, float] | None
    modules: int
    histories: tuple[tuple[str | None, list[HistogramAtStep]], ...]


@dataclass(frozen=True, eq=False)
class MatrixView:
    """The latest matrix of a kind, and its step."""

    title: str
    step: int
    matrix: Matrix


class Chart:
    """The values of all modules of one kind in one pass.

    Its size grows neither with steps nor, beyond `most` modules, with modules.

    Parameters
    ----------
    series : Series
        The first series of the chart; gives title and limits.
    most : int
        Largest number of lines; more modules are shown as quantiles.

    Examples
    --------
    >>> chart = Chart(Series("weights_norm2", "fc"))
    >>> chart.add(0, {"fc": 1.0, "out": 3.0})
    >>> view = chart.view()
    >>> view.title, [(line.name, line.values.tolist()) for line in view.lines]
    ('weights_norm2', [('fc', [1.0]), ('out', [3.0])])
    """

    def __init__(self, series: Series, most: int = 16) -> None:
        self._series = series
        self._most = most
        self._names: set[str | None] = set()
        self._curves: dict[str | None, Curve] = {}
        self._quantiles = QuantileBands()

    def add(self, step: int, values: Mapping[str | None, float]) -> None:
        """Add the values of a step, by module."""
        self._names.update(values)
        if len(self._names) > 1:
            self._quantiles.add(step, list(values.values()))
        if len(self._names) > self._most:
            self._curves.clear()
            return
        for name, value in values.items():
            if (curve := self._curves.get(name)) is None:
                curve = self._curves[name] = Curve()
            curve.add(step, value)

    def view(self) -> ChartView:
        """Return a copy."""
        lines = tuple(Line(name, *curve.points()) for name, curve in self._curves.items())
        quantiles = None if lines else self._quantiles.view()
        return ChartView(
            heading(self._series), self._series.kind, self._series.ylims, len(self._names), lines, quantiles
        )


class HistogramChart:
    """The histograms of the first `most` modules of one kind in one pass."""

    def __init__(self, series: Series, most: int = 12) -> None:
        self._series = series
        self._most = most
        self._names: set[str | None] = set()
        self._histories: dict[str | None, HistogramHistory] = {}

    def add(self, step: int, values: Mapping[str | None, object]) -> None:
        """Add the histograms of a step, by module."""
        self._names.update(values)
        for name, histogram in values.items():
            if name not in self._histories and len(self._histories) < self._most:
                self._histories[name] = HistogramHistory()
            if name in self._histories:
                self._histories[name].add(step, histogram)  # type: ignore[arg-type]  # the argument of add_histogram()

    def view(self) -> HistogramsView:
        """Return a copy."""
        histories = tuple((name, view) for name, history in self._histories.items() if (view := history.view()))
        return HistogramsView(heading(self._series), self._series.kind, self._series.ylims, len(self._names), histories)


class MatrixChart:
    """The latest matrix of a kind."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._latest: tuple[int, Matrix] | None = None

    def add(self, step: int, values: Mapping[str | None, Matrix]) -> None:
        """Replace the matrix by the last one of a step."""
        self._latest = step, list(values.values())[-1]

    def view(self) -> MatrixView:
        """Return the matrix; call it only after :meth:`add`."""
        assert self._latest is not None
        return MatrixView(heading(self._series), *self._latest)


def heading(series: Series) -> str:
    """Return the title of the picture of a series.

    Examples
    --------
    >>> heading(Series("loss", None, "testing"))
    'loss (testing)'
    """
    title = series.title or series.kind
    return title if series.pass_name == "training" else f"{title} ({series.pass_name})"
