"""All values of a run as arrays, and which of them a resumed training has replaced."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["ValuePart", "ValueTable", "joined"]

Number = TypeVar("Number", bound=np.generic)
_LAST = np.iinfo(np.int64).max


@dataclass(slots=True)
class ValuePart:
    """The values of the files of one writer, in the order in which they were written.

    Parameters
    ----------
    series : ndarray (values,)
        The number of each value's series.
    steps, values, times : ndarray (values,)
        Step, value and time.
    restarts : list of (int, int)
        For each restart how many values are before it, and the step from which on they are replaced.
    """

    series: NDArray[np.int32]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    times: NDArray[np.float64]
    restarts: list[tuple[int, int]] = field(default_factory=list)

    def sessions(self) -> NDArray[np.int32]:
        """Return for each value the number of restarts before it."""
        places = [place for place, _ in self.restarts]
        return np.searchsorted(np.array(places, np.int64), np.arange(len(self.series)), "right").astype(np.int32)

    def valid(self) -> NDArray[np.bool_]:
        """Return for each value whether no restart after it has replaced it.

        Examples
        --------
        >>> steps = np.array([0, 1, 2, 1, 2])
        >>> part = ValuePart(np.zeros(5, np.int32), steps, np.ones(5), np.ones(5), [(3, 1)])
        >>> part.valid().tolist()
        [True, False, False, True, True]
        """
        steps = np.array([step for _, step in self.restarts] + [_LAST], np.int64)
        first = np.minimum.accumulate(steps[::-1])[::-1]  # the first step that any later restart replaces
        kept: NDArray[np.bool_] = self.steps < first[self.sessions()]
        kept |= first[self.sessions()] == _LAST
        return kept

    def kept(self) -> "ValuePart":
        """Return the values that no restart has replaced."""
        if not self.restarts:
            return self
        mask = self.valid()
        return ValuePart(self.series[mask], self.steps[mask], self.values[mask], self.times[mask])


def joined(parts: Sequence[ValuePart]) -> ValuePart:
    """Return parts as one; their restarts are positions in it."""
    return ValuePart(
        _joined([part.series for part in parts], np.int32),
        _joined([part.steps for part in parts], np.int64),
        _joined([part.values for part in parts], np.float64),
        _joined([part.times for part in parts], np.float64),
        [restart for part in parts for restart in part.restarts],
    )


class ValueTable:
    """The values of all parts, grouped by series.

    Parameters
    ----------
    parts : iterable of ValuePart
        The parts.
    count : int
        The number of series.
    """

    def __init__(self, parts: Iterable[ValuePart], count: int) -> None:
        self.parts = list(parts)
        self.count = count
        valid = [part.kept() for part in self.parts]
        series = _joined([part.series for part in valid], np.int32)
        # numbers of 16 bits are sorted by radix
        order = np.argsort(series.astype(np.uint16) if count < 1 << 16 else series, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(series, minlength=count))])
        self._steps = _joined([part.steps for part in valid], np.int64)[order]
        self._values = _joined([part.values for part in valid], np.float64)[order]
        self._times = _joined([part.times for part in valid], np.float64)[order]

    def series(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Return steps, values and times of a series."""
        part = slice(self._bounds[number], self._bounds[number + 1])
        return self._steps[part], self._values[part], self._times[part]

    def size(self, number: int) -> int:
        """Return the number of values of a series."""
        return int(self._bounds[number + 1] - self._bounds[number])

    def sessions(
        self, wanted: NDArray[np.bool_]
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]]:
        """Yield series, steps and values of each part of the training between two restarts, in the order of steps.

        Parameters
        ----------
        wanted : ndarray (series,)
            The series to yield.
        """
        numbers = [part.sessions() for part in self.parts]
        last = max((int(each.max(initial=0)) for each in numbers), default=0)
        for session in range(last + 1):
            masks = [
                (number == session) & wanted[part.series] for number, part in zip(numbers, self.parts, strict=True)
            ]
            pairs = list(zip(self.parts, masks, strict=True))
            series = _joined([part.series[mask] for part, mask in pairs], np.int32)
            steps = _joined([part.steps[mask] for part, mask in pairs], np.int64)
            values = _joined([part.values[mask] for part, mask in pairs], np.float64)
            if (np.diff(steps) < 0).any():
                order = np.argsort(steps, kind="stable")
                series, steps, values = series[order], steps[order], values[order]
            yield series, steps, values


def _joined(arrays: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, dtype)])
