"""Everything that rules read: the series of a run up to the present step, and the network that they belong to."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

from ikkuna.numerics.spike_score import SpikeScore
from ikkuna.store.values import ModuleEntry

_KEPT = 400
_FIRST = 20


class TimeSeries:
    """The first and the latest values of one series.

    Its memory is bounded: it keeps its first 20 and its last 400 values.

    Attributes
    ----------
    steps : deque of int
        The steps of the latest values.
    values : deque of float
        The latest values.
    first_steps : list of int
        The steps of the first values.
    first : list of float
        The first values.
    count : int
        Number of values ever added.
    last : float
        The latest value; NaN before.
    step : int
        The step of the latest value; -1 before.

    Examples
    --------
    >>> curve = TimeSeries()
    >>> for step, value in enumerate([4.0, 3.0, 2.0]):
    ...     curve.add(step, value)
    >>> curve.last, curve.step, curve.median(2), curve.tail(2)
    (2.0, 2, 2.5, [3.0, 2.0])
    """

    __slots__ = ("count", "first", "first_steps", "last", "step", "steps", "values")

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_KEPT)
        self.values: deque[float] = deque(maxlen=_KEPT)
        self.first_steps: list[int] = []
        self.first: list[float] = []
        self.count = 0
        self.last, self.step = math.nan, -1

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.add_to_each((self,), step, (value,))

    @staticmethod
    def add_to_each(curves: Iterable["TimeSeries"], step: int, values: Iterable[float]) -> None:
        """Append one value to each of several series."""
        for curve, value in zip(curves, values, strict=True):
            curve.last, curve.step = value, step
            curve.steps.append(step)
            curve.values.append(value)
            if curve.count < _FIRST:
                curve.first_steps.append(step)
                curve.first.append(value)
            curve.count += 1

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Append values; there is at least one."""
        self.last, self.step = values[-1], steps[-1]
        self.steps.extend(steps)
        self.values.extend(values)
        if (room := _FIRST - self.count) > 0:
            self.first_steps.extend(steps[:room])
            self.first.extend(values[:room])
        self.count += len(values)

    def kept(self) -> dict[int, float]:
        """Return the first and the latest values by their steps."""
        first, latest = zip(self.first_steps, self.first, strict=True), zip(self.steps, self.values, strict=True)
        return {**dict(first), **dict(latest)}

    def tail(self, number: int, skip: int = 0) -> list[float]:
        """Return up to `number` of the latest values, oldest first, without the `skip` latest."""
        return list(islice(reversed(self.values), skip, skip + number))[::-1]

    def median(self, number: int, skip: int = 0) -> float:
        """Return the median of those of the latest `number` values that are not NaN; NaN if there is none."""
        return middle(self.tail(number, skip))

    def points(self, number: int = 50) -> tuple[tuple[int | str, float], ...]:
        """Return the latest values with their steps."""
        return tuple(list(zip(self.steps, self.values, strict=True))[-number:])


def middle(values: list[float]) -> float:
    """Return the median of the values that are not NaN; NaN if there is none.

    Examples
    --------
    >>> middle([3.0, float("nan"), 1.0])
    2.0
    """
    total = sum(values)
    known = sorted(values if total == total else [value for value in values if value == value])
    if not known:
        return math.nan
    low, high = known[(len(known) - 1) // 2], known[len(known) // 2]
    return low if low == high else (low + high) / 2


class Network:
    """The modules of a network in their order.

    A series has the name of a module, with the name of a parameter (``lstm.weight_ih_l0``) or of an output (``lstm:1.0``) appended.

    Parameters
    ----------
    modules : iterable of ModuleEntry
        The modules.

    Examples
    --------
    >>> network = Network([ModuleEntry("fc", "Linear", (("weight", (2, 3)), ("bias", (2,)))), ModuleEntry("act", "ReLU")])
    >>> network.position("act"), network.class_of("fc"), network.shape_of("fc"), network.is_matrix("fc")
    (1, 'Linear', (2, 3), True)
    >>> network.named("ReLU", "GELU")
    ('act',)
    """

    def __init__(self, modules: Iterable[ModuleEntry] = ()) -> None:
        self.modules = tuple(modules)
        self._positions = {entry.name: i for i, entry in enumerate(self.modules)}
        self._modules: dict[str | None, str | None] = {}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in self.modules:
            for role, shape in entry.parameters:
                name = entry.name if role == "weight" else f"{entry.name}.{role}"
                if shape is not None:
                    shapes.setdefault(name, shape)
        return shapes

    def module(self, series: str | None) -> str | None:
        """Return the module that a series belongs to; ``None`` if it is unknown."""
        if series not in self._modules:
            name = (series or "").partition(":")[0]
            while name and name not in self._positions:
                name = name.rpartition(".")[0]
            self._modules[series] = name or None
        return self._modules[series]

    def position(self, series: str | None) -> int:
        """Return the position of a series' module; behind all others if it is unknown."""
        return self._positions.get(self.module(series) or "", len(self.modules))

    def entry(self, series: str | None) -> ModuleEntry | None:
        """Return the description of a series' module; ``None`` if it is unknown."""
        module = self.module(series)
        return None if module is None else self.modules[self._positions[module]]

    def class_of(self, series: str | None) -> str:
        """Return the class name of a series' module; empty if it is unknown."""
        entry = self.entry(series)
        return "" if entry is None else entry.class_name

    def shape_of(self, series: str) -> tuple[int, ...] | None:
        """Return the shape of the parameter of a series; ``None`` if it is unknown."""
        return self._shapes.get(series)

    def is_matrix(self, series: str) -> bool:
        """Return whether a series is that of a weight with two or more axes; an unknown shape counts as a matrix."""
        shape = self.shape_of(series)
        return shape is None or len(shape) > 1

    def size_of(self, series: str) -> int:
        """Return the number of elements of the parameter of a series; 1 if it is unknown."""
        return math.prod(self.shape_of(series) or (1,))

    def is_normalised(self, series: str) -> bool:
        """Return whether the next module normalises what the module of a series returns.

        The scale of the module's weight does then not change the outputs of the network, and its gradient is inversely proportional
        to that scale.  The next module is that of the order of registration, without containers.

        Examples
        --------
        >>> network = Network([ModuleEntry("conv", "Conv2d"), ModuleEntry("norm", "BatchNorm2d"), ModuleEntry("fc", "Linear")])
        >>> network.is_normalised("conv"), network.is_normalised("fc")
        (True, False)
        """
        following = self.position(series) + 1
        return following < len(self.modules) and "Norm" in self.modules[following].class_name

    def named(self, *classes: str) -> tuple[str, ...]:
        """Return the names of the modules of some classes."""
        return tuple(entry.name for entry in self.modules if entry.class_name in classes)


TRAINING = "training"
GRADIENTS = "gradients_global_norm"
"""The kind of the global norm of the gradients that the optimizer receives."""
_SCORES = 1024


class ScoredSeries:
    """A series of which each value is compared with those before it, see `ikkuna.numerics.spike_score`.

    Attributes
    ----------
    score : SpikeScore
        The running score.
    latest : deque of (int, float, float)
        The last steps, their values and the scores of these.

    Examples
    --------
    >>> series = ScoredSeries()
    >>> len(series.add([*range(64)], [1.0] * 32 + [9.0] + [1.0] * 31)), series.latest[-1]
    (33, (32, 9.0, 16000.0))
    """

    def __init__(self) -> None:
        self.score = SpikeScore()
        self.latest: deque[tuple[int, float, float]] = deque(maxlen=_SCORES)

    def add(self, steps: Iterable[int], values: Iterable[float]) -> list[float]:
        """Add the values of steps up to the first spike; return their scores."""
        values = list(values)
        scores = self.score.add_until_spike(values)
        self.latest.extend(zip(steps, values, scores, strict=False))
        return scores


class History:
    """The series of a run, up to and including the present step.

    Parameters
    ----------
    network : Network, optional
        The modules of the network.

    Attributes
    ----------
    step : int
        The present step.
    begin : int or None
        The first step; above 0 if the run continues another one.
    memory : dict of str to dict
        What each rule stores from one step to the next, by its name; empty after a restart.
    scored : dict of str to ScoredSeries
        The losses of all steps, and the global norms of gradients as far as they are read; their curves get the values later.

    Examples
    --------
    >>> history = History()
    >>> history.add("loss", None, 0, 0.7)
    >>> history.curve("loss").last
    0.7
    """

    def __init__(self, network: Network | None = None) -> None:
        self.network = network or Network()
        self.clear()

    def clear(self) -> None:
        """Forget everything but the network."""
        self.step = -1
        self._nonfinite_step: int | None = None  # the last one
        self.begin: int | None = None
        self.memory: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self._curves: defaultdict[tuple[str, str], dict[str | None, TimeSeries]] = defaultdict(dict)
        self._matrices: dict[tuple[str, Network], list[tuple[str, TimeSeries]]] = {}
        self._fresh: dict[tuple[str, str | Network, int], list[tuple[str, TimeSeries]]] = {}  # until the next value
        self.scored = {"loss": ScoredSeries(), GRADIENTS: ScoredSeries()}

    @property
    def is_finite(self) -> bool:
        """Whether all values of the present step are finite, as far as their sums show that."""
        return self._nonfinite_step != self.step

    @property
    def is_complete(self) -> bool:
        """Whether the history begins with the first step of the training."""
        return self.begin == 0

    def add(self, kind: str, name: str | None, step: int, value: float, pass_name: str = TRAINING) -> None:
        """Append a value to a series."""
        self.add_all(kind, (name,), step, (value,), pass_name)

    def add_all(
        self, kind: str, names: Sequence[str | None], step: int, values: Sequence[float], pass_name: str = TRAINING
    ) -> None:
        """Append one value to each of several series of a kind."""
        if self.begin is None:
            self.begin = step
        self.step = max(self.step, step)
        if not math.isfinite(sum(values)):
            self._nonfinite_step = step
        self._fresh.clear()
        curves = self._curves[kind, pass_name]
        if not curves.keys() >= set(names):
            curves = self._insert(kind, pass_name, *names)
        TimeSeries.add_to_each(map(curves.__getitem__, names), step, values)

    def extend(self, kind: str, name: str | None, steps: Sequence[int], values: Sequence[float]) -> None:
        """Append finite values of training steps to a series; there is at least one."""
        if self.begin is None:
            self.begin = steps[0]
        self.step = max(self.step, steps[-1])
        self._fresh.clear()
        curves = self._curves[kind, TRAINING]
        if name not in curves:
            curves = self._insert(kind, TRAINING, name)
        curves[name].extend(steps, values)

    def _insert(self, kind: str, pass_name: str, *names: str | None) -> dict[str | None, TimeSeries]:
        """Add the curves that do not exist, and sort the curves of their kind as in the network."""
        known = self._curves[kind, pass_name]
        curves = {**{name: TimeSeries() for name in names}, **known}
        self._matrices.clear()
        ordered = sorted(curves, key=lambda series: (self.network.position(series), series or ""))
        found = self._curves[kind, pass_name] = {series: curves[series] for series in ordered}
        return found

    def curves(self, kind: str, pass_name: str = TRAINING) -> dict[str | None, TimeSeries]:
        """Return the series of a kind by name, in the order of the network."""
        return self._curves.get((kind, pass_name), {})

    def all_curves(self) -> Iterator[tuple[str, str, str | None, TimeSeries]]:
        """Yield kind, pass, name and curve of every series."""
        for (kind, pass_name), curves in self._curves.items():
            for name, curve in curves.items():
                yield kind, pass_name, name, curve

    def curve(self, kind: str, pass_name: str = TRAINING) -> TimeSeries | None:
        """Return the first series of a kind; ``None`` if there is none."""
        curves = self._curves.get((kind, pass_name))
        return next(iter(curves.values()), None) if curves else None

    def fresh(self, kind: str, pass_name: str = TRAINING) -> list[tuple[str, TimeSeries]]:
        """Return name and curve of the series of a kind that have a value at the present step."""
        key = kind, pass_name, (step := self.step)
        if (found := self._fresh.get(key)) is None:
            curves = self.curves(kind, pass_name)
            found = self._fresh[key] = [(name or "", curve) for name, curve in curves.items() if curve.step == step]
        return found

    def now(self, kind: str, pass_name: str = TRAINING) -> TimeSeries | None:
        """Return the first series of a kind if it has a value at the present step."""
        curve = self.curve(kind, pass_name)
        return curve if curve is not None and curve.step == self.step else None

    @property
    def loss_has_fallen(self) -> bool | None:
        """Whether the loss falls, or has fallen and stays low, by its values; ``None`` while fewer than ten are known.

        The median of the last five values is compared with that of the first five: it is lower by more than 2% and than the median
        absolute deviation of the first five, and higher than that of the five values before by less than half of the fall.
        """
        curve = self.curve("loss")
        if curve is None:
            return None
        if not math.isfinite(curve.last):
            return False
        if curve.count < 10:
            return None
        first, recent, before = middle(curve.first[:5]), curve.median(5), curve.median(5, skip=5)
        noise = middle([abs(value - first) for value in curve.first[:5]])
        fall = first - recent
        return fall > max(0.02 * abs(first), noise) and recent - before < 0.5 * fall

    @property
    def loss_falls(self) -> bool | None:
        """Whether the loss falls: by its values, or by what the steps do to it, where the values of different batches hide that.

        The movement of the weights has lowered the loss by more than 2% of its first level, see ``loss_change_bound``, and the median of
        the last five values is not above that of the first five by more than these differ.
        """
        has_fallen, curve, bounds = self.loss_has_fallen, self.curve("loss"), self.curve("loss_change_bound")
        if has_fallen is not False or curve is None or bounds is None or not math.isfinite(curve.last):
            return has_fallen
        first, values = middle(curve.first[:5]), curve.first[:5]
        is_lowered = -sum(bounds.values) > 0.02 * abs(first)
        return is_lowered and curve.median(5) - first <= max(values) - min(values)

    @property
    def is_maximised(self) -> bool:
        """Whether an optimizer maximises the loss, as with ``maximize=True``."""
        return any(curve.last for curve in self.curves("optimizer_maximize").values())

    def matrices(self, kind: str) -> list[tuple[str, TimeSeries]]:
        """Return the fresh series of weights with two or more axes."""
        key = kind, self.network, (step := self.step)
        if (fresh := self._fresh.get(key)) is None:
            if (found := self._matrices.get(key[:2])) is None:
                curves = ((name or "", curve) for name, curve in self.curves(kind).items())
                found = self._matrices[key[:2]] = [each for each in curves if self.network.is_matrix(each[0])]
            fresh = self._fresh[key] = [each for each in found if each[1].step == step]
        return fresh
