"""The differences between ranks."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["RankSpreadSubscriber"]

_STATISTICS: dict[str, tuple[tuple[str, ...], Callable[[Record], float]]] = {
    "norm2": (("sumsq",), lambda record: record.l2_norm),
    "rms": (("sumsq",), lambda record: record.rms),
    "mean": (("mean",), lambda record: record.mean),
    "variance": (("m2",), lambda record: record.variance()),
    "largest": (("min", "max"), lambda record: record.linf_norm),
    "sparsity": (("zeros",), lambda record: record.sparsity),
    "nonfinite": (("nans", "infs"), lambda record: float(record.nonfinite)),
}
_RESULTS = ("min", "median", "max", "argmin", "argmax")


class RankSpreadSubscriber(SharedStatisticSubscriber):
    """The smallest, the median and the largest value of a statistic over ranks, and the ranks of the extremes.

    Every other metric describes all ranks together; this one compares the ranks before they are merged, and so finds a faulty device.
    Activations, layer gradients, the loss and inputs are those of a rank's own data.
    Weights and their gradients are equal on all ranks under DDP, where any difference is an error, and shards under FSDP.

    Takes any kind with a tensor; publishes ``{kind}_ranks_{statistic}_min``, ``_median`` and ``_max``, in the unit of the statistic,
    and ``_argmin`` and ``_argmax``, which are ranks.
    If a rank has NaN, all three values are NaN, and both extremes are the first rank with NaN.
    A rank that did not see the tensor is left out; in one process all values are those of this process, and the rank is 0.

    Look for: one rank that is always the extreme, and a largest value far from the median.

    Parameters
    ----------
    kind : str
        The kind to measure.
    statistic : str
        ``"norm2"``, ``"rms"``, ``"mean"``, ``"variance"``, ``"largest"`` (magnitude), ``"sparsity"`` or ``"nonfinite"`` (elements).
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the statistic is unknown.

    Examples
    --------
    >>> RankSpreadSubscriber("loss", "mean").publishes[-2:]
    ('loss_ranks_mean_argmin', 'loss_ranks_mean_argmax')
    """

    per_rank = True

    def __init__(self, kind: str, statistic: str = "rms", **options: Any) -> None:
        if statistic not in _STATISTICS:
            known = ", ".join(_STATISTICS)
            raise ConfigError(f"RankSpreadSubscriber needs one of the statistics {known}, got {statistic!r}")
        self.results = [f"ranks_{statistic}_{result}" for result in _RESULTS]
        super().__init__(kind, **options)
        self.statistic = statistic
        self.fields = _STATISTICS[statistic][0]

    def values(self, record: Record) -> tuple[float, float, float, int, int]:
        """Return the three values and the two ranks."""
        value_of = _STATISTICS[self.statistic][1]
        ranks = enumerate(record.ranks or (record,))
        return _spread({rank: value_of(own) for rank, own in ranks if own is not None and own.n})


def _spread(values: dict[int, float]) -> tuple[float, float, float, int, int]:
    if undefined := [rank for rank, value in values.items() if math.isnan(value)]:
        return math.nan, math.nan, math.nan, undefined[0], undefined[0]
    lowest, highest = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return values[lowest], median(values.values()), values[highest], lowest, highest
