"""The data of charts, in bounded size: curves, quantiles over many modules, histograms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ikkuna.store.names import Series
from ikkuna.store.quantity import NEUTRAL, Quantity
from ikkuna.store.values import HistogramLike, Matrix

T = TypeVar("T")


class Decimator(Generic[T]):
    """Merges groups of consecutive items, so that at most `capacity` entries are kept.

    Each entry is the merge of the same number of items, a power of 2; only the last entry may cover fewer.
    When all entries are used, each two neighbours are merged into one, and the groups become twice as large.
    The entries keep the order of the items.

    Parameters
    ----------
    capacity : int
        Largest number of entries, an even number.
    merge : callable
        Returns the merge of an earlier and a later entry.

    Examples
    --------
    >>> largest = Decimator(capacity=4, merge=max)
    >>> for item in [3, 1, 2, 9, 5, 4]:
    ...     largest.add(item)
    >>> largest.entries()
    [3, 9, 5]
    """

    def __init__(self, capacity: int, merge: Callable[[T, T], T]) -> None:
        self._capacity = capacity
        self._merge = merge
        self._entries: list[T] = []
        self._group = 1  # items of an entry
        self._room = 0  # items that the last entry still takes

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, item: T) -> None:
        """Add an item: merge it into the last entry, or begin the next one."""
        if self._room:
            self._entries[-1] = self._merge(self._entries[-1], item)
            self._room -= 1
            return
        if len(self._entries) == self._capacity:
            pairs = zip(self._entries[::2], self._entries[1::2], strict=True)
            self._entries = [self._merge(*pair) for pair in pairs]
            self._group *= 2
        self._entries.append(item)
        self._room = self._group - 1

    def entries(self) -> list[T]:
        """Return a copy of the list of entries."""
        return list(self._entries)


def keep_first(first: T, second: T) -> T:
    """Return the earlier of two entries; with it, a :class:`Decimator` keeps evenly spaced items."""
    return first


CAPACITY = 512
"""Largest number of points, apart from the first and the last: more than the eye can distinguish in a picture."""

_Point = tuple[int, float]


class _Extremes(NamedTuple):
    """The points with the least and the greatest value of consecutive steps."""

    low: _Point
    high: _Point


class Curve:
    """Keeps the first and the last value of a series, and the least and the greatest value of each group of steps.

    All values are kept while there are at most `capacity` of them.
    NaN is less than every number, so that it is never merged away.

    Parameters
    ----------
    capacity : int
        Largest number of points, apart from the first and the last; a multiple of 4.

    Examples
    --------
    >>> curve = Curve(capacity=8)
    >>> for step in range(100):
    ...     curve.add(step, 9.0 if step == 42 else 0.0)
    >>> steps, values = curve.points()
    >>> len(steps) <= 8 + 2, steps[values == 9.0].tolist(), steps[[0, -1]].tolist()
    (True, [42], [0, 99])
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._extremes = Decimator(capacity // 2, _merge_points)
        self._first: _Point | None = None
        self._last: _Point | None = None

    def add(self, step: int, value: float) -> None:
        """Add a value."""
        self._last = point = step, value
        if self._first is None:
            self._first = point
        self._extremes.add(_Extremes(point, point))

    def points(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return steps and values, as copies."""
        kept = [point for extremes in self._extremes.entries() for point in extremes]
        ends = [point for point in (self._first, self._last) if point is not None]
        values = dict(sorted((*kept, *ends), key=lambda point: point[0]))
        return np.array(list(values), np.int64), np.array(list(values.values()), np.float64)


def _merge_points(a: _Extremes, b: _Extremes) -> _Extremes:
    """Return the extremes of both; of equal values the outermost, so that two items stay two points."""
    low = b.low if b.low[1] < a.low[1] or (_is_nan(b.low) and not _is_nan(a.low)) else a.low
    high = a.high if a.high[1] > b.high[1] or (_is_nan(b.high) and not _is_nan(a.high)) else b.high
    return _Extremes(low, high)


def _is_nan(point: _Point) -> bool:
    return point[1] != point[1]  # math.isnan() takes twice as long


_STEPS = 256
_PROBABILITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NANS = (float("nan"),) * len(_PROBABILITIES)


@dataclass(frozen=True, eq=False)
class QuantileView:
    """Minimum, quartiles and maximum over some modules.

    Parameters
    ----------
    steps : ndarray
        (point,)
    values : ndarray
        (5, point)
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class _Quantiles(NamedTuple):
    """Quantiles of `length` consecutive steps, the first of which is `step`."""

    step: int
    length: int
    values: tuple[float, ...]


class QuantileBands:
    """Keeps minimum, quartiles and maximum over all modules for each step, or for each group of steps of a long run.

    For a group of steps these are the minimum, the means of the quartiles, and the maximum.
    If one of the values of a step is NaN, all quantiles of the step are NaN: a layer that has diverged must stay visible.

    Examples
    --------
    >>> bands = QuantileBands()
    >>> bands.add(7, [4.0, 1.0, 2.0, 3.0, 5.0])
    >>> view = bands.view()
    >>> view.steps.tolist(), view.values[:, 0].tolist()
    ([7], [1.0, 2.0, 3.0, 4.0, 5.0])
    """

    def __init__(self) -> None:
        self._quantiles = Decimator(_STEPS, _merge_quantiles)

    def add(self, step: int, values: list[float]) -> None:
        """Add the values of a step, at least one."""
        self._quantiles.add(_Quantiles(step, 1, _quantiles(values)))

    def view(self) -> QuantileView:
        """Return a copy of the quantiles."""
        entries = self._quantiles.entries()
        values = np.array([entry.values for entry in entries], np.float64).reshape(-1, len(_PROBABILITIES))
        return QuantileView(np.array([entry.step for entry in entries], np.int64), values.T)


def _quantiles(values: list[float]) -> tuple[float, ...]:
    if any(value != value for value in values):  # NaN; math.isnan() takes twice as long
        return _NANS
    ordered = sorted(values)
    return tuple(_quantile(ordered, probability) for probability in _PROBABILITIES)


def _quantile(ordered: list[float], probability: float) -> float:
    place = probability * (len(ordered) - 1)
    low = ordered[int(place)]
    high = ordered[min(int(place) + 1, len(ordered) - 1)]
    return low if low == high else low + (place - int(place)) * (high - low)


def _merge_quantiles(a: _Quantiles, b: _Quantiles) -> _Quantiles:
    length = a.length + b.length
    if a.values[0] != a.values[0] or b.values[0] != b.values[0]:
        return _Quantiles(a.step, length, _NANS)
    share = b.length / length
    means = [x * (1 - share) + y * share for x, y in zip(a.values[1:-1], b.values[1:-1], strict=True)]
    return _Quantiles(a.step, length, (min(a.values[0], b.values[0]), *means, max(a.values[-1], b.values[-1])))


_HISTOGRAMS = 16


@dataclass(frozen=True, eq=False)
class HistogramAtStep:
    """One histogram.

    Parameters
    ----------
    step : int
    counts : ndarray
        (bucket,)
    edges : ndarray
        (bucket + 1,)
    """

    step: int
    counts: NDArray[np.float64]
    edges: NDArray[np.float64]


class HistogramHistory:
    """Keeps up to 16 evenly spaced histograms, and the latest.

    Examples
    --------
    >>> from ikkuna.numerics.statistics.histogram import Buckets
    >>> history = HistogramHistory()
    >>> for step in range(100):
    ...     history.add(step, Buckets(0.0, 2.0, 3, 0.0, 0.0, [1.0, 2.0], [2.0, 1.0]))
    >>> [histogram.step for histogram in history.view()], history.view()[0].edges.tolist()
    ([0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 99], [0.0, 1.0, 2.0])
    """

    def __init__(self) -> None:
        self._kept: Decimator[HistogramAtStep] = Decimator(_HISTOGRAMS, keep_first)
        self._latest: HistogramAtStep | None = None

    def add(self, step: int, histogram: HistogramLike) -> None:
        """Add a histogram; an empty one is ignored."""
        counts = np.array(histogram.bucket_counts, np.float64)
        if counts.any():
            self._latest = HistogramAtStep(step, counts, _edges(histogram))
            self._kept.add(self._latest)

    def view(self) -> list[HistogramAtStep]:
        """Return the histograms, the earliest first."""
        kept = self._kept.entries()
        return kept if self._latest is None or kept[-1] is self._latest else [*kept, self._latest]


def _edges(histogram: HistogramLike) -> NDArray[np.float64]:
    """Return the edges of all buckets; the left edge of the first one follows from the minimum."""
    limits = np.array(histogram.bucket_limits, np.float64)
    width = limits[1] - limits[0] if len(limits) > 1 else 0.0
    first = histogram.min if histogram.min < limits[0] else limits[0] - (width or abs(limits[0]) * 0.01 or 0.01)
    return np.concatenate([[first], limits])


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
    quantity: Quantity = NEUTRAL


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
            heading(self._series),
            self._series.quantity.label(self._series.kind),
            self._series.ylims,
            len(self._names),
            lines,
            quantiles,
            self._series.quantity,
        )


class HistogramChart:
    """The histograms of the first 12 modules of one kind in one pass."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._names: set[str | None] = set()
        self._histories: dict[str | None, HistogramHistory] = {}

    def add(self, step: int, values: Mapping[str | None, object]) -> None:
        """Add the histograms of a step, by module."""
        self._names.update(values)
        for name, histogram in values.items():
            if name not in self._histories and len(self._histories) < 12:
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
