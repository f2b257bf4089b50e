"""The values of one series, as rules read them."""

from collections import deque
from statistics import median

__all__ = ["TimeSeries", "middle"]

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

    Examples
    --------
    >>> curve = TimeSeries()
    >>> for step, value in enumerate([4.0, 3.0, 2.0]):
    ...     curve.add(step, value)
    >>> curve.last, curve.step, curve.median(2), curve.tail(2)
    (2.0, 2, 2.5, [3.0, 2.0])
    """

    __slots__ = ("count", "first", "first_steps", "steps", "values")

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=_KEPT)
        self.values: deque[float] = deque(maxlen=_KEPT)
        self.first_steps: list[int] = []
        self.first: list[float] = []
        self.count = 0

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)
        if self.count < _FIRST:
            self.first_steps.append(step)
            self.first.append(value)
        self.count += 1

    @property
    def last(self) -> float:
        """The latest value."""
        return self.values[-1]

    @property
    def step(self) -> int:
        """The step of the latest value."""
        return self.steps[-1]

    def tail(self, number: int, skip: int = 0) -> list[float]:
        """Return up to `number` of the latest values, oldest first, without the `skip` latest."""
        length = len(self.values)
        return [self.values[i] for i in range(max(length - number - skip, 0), max(length - skip, 0))]

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
    known = [value for value in values if value == value]
    return median(known) if known else float("nan")
