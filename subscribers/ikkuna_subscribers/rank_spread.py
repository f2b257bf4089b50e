"""How far ranks are apart, and which is the odd one."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
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


class RankSpreadSubscriber(PlotSubscriber):
    r"""The smallest, the median and the largest over ranks of what each rank sees by itself, and which ranks the extremes are.

    Every other metric tells of all ranks together; this one tells of each before they are made one, and so finds the bad card.
    Activations, layer gradients, the loss and inputs are those of a rank's own data.
    Weights and their gradients are the same everywhere under DDP, where any spread is an error, and shards under FSDP.

    Takes any kind with a tensor; publishes ``{kind}_ranks_{statistic}_min``, ``_median`` and ``_max``, in the unit of the statistic,
    and ``_argmin`` and ``_argmax``, which are ranks.
    Where a rank has NaN all three values are NaN, and both extremes name that rank (the first, if there are several).
    A rank that has not seen the tensor is left out; in one process all are the value of this one, and the rank is 0.

    Look for: one rank that is always the extreme, and a largest value that leaves the median.

    Parameters
    ----------
    kind : str
        What to look at.
    statistic : str
        ``"norm2"``, ``"rms"``, ``"mean"``, ``"variance"``, ``"largest"`` (magnitude), ``"sparsity"`` or ``"nonfinite"`` (elements).
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        For another statistic.

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
        name_results(options, *(f"{kind}_ranks_{statistic}_{result}" for result in _RESULTS))
        super().__init__(kind, **options)
        self.statistic = statistic
        self.fields = _STATISTICS[statistic][0]

    def compute(self, message: ModuleMessage) -> None:
        """Emit the five."""
        assert message.record is not None
        ranks = message.record.ranks or (message.record,)
        value_of = _STATISTICS[self.statistic][1]
        values = {rank: value_of(record) for rank, record in enumerate(ranks) if record is not None and record.n}
        for kind, value in zip(self.publishes, _spread(values), strict=True):
            self.emit(message, value, kind)


def _spread(values: dict[int, float]) -> tuple[float, float, float, int, int]:
    if undefined := [rank for rank, value in values.items() if math.isnan(value)]:
        return math.nan, math.nan, math.nan, undefined[0], undefined[0]
    lowest, highest = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return values[lowest], median(values.values()), values[highest], lowest, highest
