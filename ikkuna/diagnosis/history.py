"""Everything that rules read: the series of a run up to the present step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis.network import Network
from ikkuna.diagnosis.time_series import TimeSeries

__all__ = ["TRAINING", "History"]

TRAINING = "training"


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
        self.begin: int | None = None
        self.memory: defaultdict[str, dict[Any, Any]] = defaultdict(dict)
        self._curves: defaultdict[tuple[str, str], dict[str | None, TimeSeries]] = defaultdict(dict)

    @property
    def is_complete(self) -> bool:
        """Whether the history begins with the first step of the training."""
        return self.begin == 0

    def add(self, kind: str, name: str | None, step: int, value: float, pass_name: str = TRAINING) -> None:
        """Append a value to a series."""
        if self.begin is None:
            self.begin = step
        self.step = max(self.step, step)
        curves = self._curves[kind, pass_name]
        curve = curves.get(name)
        if curve is None:
            curve = self._insert(kind, pass_name, name)[name]
        curve.add(step, value)

    def add_all(
        self, kind: str, names: Sequence[str | None], step: int, values: Sequence[float], pass_name: str = TRAINING
    ) -> None:
        """Append one value to each of several series of a kind."""
        if self.begin is None:
            self.begin = step
        self.step = max(self.step, step)
        curves = self._curves[kind, pass_name]
        if not curves.keys() >= set(names):
            curves = self._insert(kind, pass_name, *names)
        for name, value in zip(names, values, strict=True):
            curves[name].add(step, value)

    def _insert(self, kind: str, pass_name: str, *names: str | None) -> dict[str | None, TimeSeries]:
        """Add the curves that do not exist, and sort the curves of their kind as in the network."""
        known = self._curves[kind, pass_name]
        curves = {**{name: TimeSeries() for name in names}, **known}
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
        return next(iter(self.curves(kind, pass_name).values()), None)

    def fresh(self, kind: str, pass_name: str = TRAINING) -> Iterator[tuple[str, TimeSeries]]:
        """Yield name and curve of the series of a kind that have a value at the present step."""
        for name, curve in self.curves(kind, pass_name).items():
            if curve.step == self.step:
                yield name or "", curve

    def now(self, kind: str, pass_name: str = TRAINING) -> TimeSeries | None:
        """Return the first series of a kind if it has a value at the present step."""
        curve = self.curve(kind, pass_name)
        return curve if curve is not None and curve.step == self.step else None

    def matrices(self, kind: str) -> list[tuple[str, TimeSeries]]:
        """Return the fresh series of weights with two or more axes."""
        return [(name, curve) for name, curve in self.fresh(kind) if self.network.is_matrix(name)]
