"""The values of the modules of a kind: packed for the event file, and summarised by curves and a heat map."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.visualization.files.event_file import float32, scalar_prefix
from ikkuna.visualization.names import overview_tag
from ikkuna.visualization.pictures.event_images import HeatmapImage
from ikkuna.visualization.series import Series

__all__ = ["STATISTICS", "ModuleGroup", "PackedSeries", "overview"]

STATISTICS = ("min", "median", "max")


class PackedSeries:
    """The encoded values of a group of series, apart from their four bytes each.

    Parameters
    ----------
    prefixes : list of bytes
        The bytes before each value.
    members : array
        The positions of the series that belong to the summary of their kind.
    """

    def __init__(
        self, prefixes: list[bytes], group: "ModuleGroup | None", names: tuple[str, ...], members: Any
    ) -> None:
        self._template = np.frombuffer(b"".join(prefix + bytes(4) for prefix in prefixes), np.uint8)
        ends = np.cumsum([len(prefix) + 4 for prefix in prefixes])
        self._places = (ends - 4)[:, None] + np.arange(4)
        self.group, self.names, self.members = group, names, members

    def entries(self, values: NDArray[np.float64]) -> bytes:
        """Return the encoded values of a step."""
        block = self._template.copy()
        with np.errstate(over="ignore"):
            block[self._places] = values.astype("<f4")[:, None].view(np.uint8)
        return block.tobytes()


class ModuleGroup:
    """The modules of a kind in a pass: three curves summarise their values, and a heat map shows all of them.

    Parameters
    ----------
    member : Series
        The series of one of the modules.
    heatmap : HeatmapImage
        The heat map.

    Attributes
    ----------
    size : int
        The largest number of modules in a step so far.
    """

    def __init__(self, member: Series, heatmap: HeatmapImage) -> None:
        self.prefixes = [scalar_prefix(overview_tag(member, statistic)) for statistic in STATISTICS]
        self.heatmap = heatmap
        self.member = member
        self.size = 0
        self.values: dict[str, float] = {}
        self._many: list[tuple[tuple[str, ...], NDArray[np.float64]]] = []

    def add(self, names: tuple[str, ...], values: NDArray[np.float64]) -> None:
        """Add the values of several modules."""
        self._many.append((names, values))

    def take(self) -> tuple[Sequence[str], NDArray[np.float64]]:
        """Return the names and values of a step, and forget them."""
        single, self.values = self.values, {}  # first, so that an exception cannot make them appear twice
        many, self._many = self._many, []
        if len(many) == 1 and not single:
            self.size = max(self.size, len(many[0][0]))
            return many[0]
        for names, values in many:
            single.update(zip(names, values.tolist(), strict=True))
        self.size = max(self.size, len(single))
        return tuple(single), np.fromiter(single.values(), np.float64, len(single))

    def entries(self, values: NDArray[np.float64]) -> list[bytes]:
        """Return the three values that summarise those of a step."""
        return [prefix + float32(value) for prefix, value in zip(self.prefixes, overview(values), strict=True)]


def overview(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return minimum, median and maximum of at least one value; all are NaN if one of the values is.

    A layer that has diverged must stay visible.

    Examples
    --------
    >>> overview(np.array([4.0, 1.0, 2.0, 3.0]))
    (1.0, 2.5, 4.0)
    >>> overview(np.array([4.0, float("nan")]))
    (nan, nan, nan)
    """
    if np.isnan(values).any():
        return math.nan, math.nan, math.nan
    ordered = np.sort(values)
    low, high = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    return float(ordered[0]), low if low == high else low / 2 + high / 2, float(ordered[-1])
