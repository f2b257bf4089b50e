"""Percentiles of a tensor."""

from collections.abc import Sequence
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.numerics.statistics.histograms import Histograms
from ikkuna.numerics.statistics.records import Records

__all__ = ["SIGMA_PERCENTILES", "PercentileSubscriber"]

SIGMA_PERCENTILES = (0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87)
"""The percentiles of a normal distribution at -3, -2, … 3 standard deviations from its mean."""


class PercentileSubscriber(SharedStatisticSubscriber):
    r"""Values below which given percentages of the elements of a tensor lie.

    The percentile *q* is at rank :math:`(n - 1) q / 100` of the ordered elements, with linear interpolation between two elements,
    as in ``numpy.percentile``.  It is computed from a histogram of leading bits (see `HistogramSubscriber`).
    Its relative error is at most one eighth; the 0th and the 100th percentile are exact.

    Takes any kind with a tensor; publishes ``{kind}_percentile_{q}`` for each, in the unit of x.
    Over several calls and micro-batches they are those of all elements together.
    Infinite elements are ordered like others; data with a NaN has percentiles NaN; `finite_only` leaves both out.
    An empty tensor publishes nothing.

    Look for: for a normal distribution the seven default percentiles are evenly spaced.
    Percentiles that spread to one side, or converge to one value, show how a layer fails.

    Parameters
    ----------
    kind : str
        The kind to measure.
    percentiles : number or sequence of numbers
        Different numbers in [0, 100]; by default those at -3 to 3 standard deviations of a normal distribution.
    exact : bool
        Whether all elements are counted, which costs about five sums over them.
        By default a random sample of 65,536 elements is counted; it gives the share below a percentile to 0.2 %.
    **options : Any
        See `SharedStatisticSubscriber`.

    Raises
    ------
    ConfigError
        If `percentiles` is empty, out of range or has a number twice.

    Examples
    --------
    >>> PercentileSubscriber("weights", percentiles=[2.28, 50]).publishes
    ('weights_percentile_2.28', 'weights_percentile_50')
    """

    accepts_finite_only = True

    def __init__(
        self,
        kind: str,
        percentiles: float | Sequence[float] = SIGMA_PERCENTILES,
        *,
        exact: bool = False,
        **options: Any,
    ) -> None:
        self.percentiles = _checked(percentiles)
        self.results = [f"percentile_{q:g}" for q in self.percentiles]
        super().__init__(kind, **options)
        self.exact = exact
        self.fields = ("codes" if exact else "sampled_codes", "finite_min", "finite_max")

    def values(self, record: Record | Records) -> list[Any]:
        """Return the percentiles."""
        histogram: Any
        if isinstance(record, Records):
            histogram = Histograms.of_records(record, self.exact)
        else:
            histogram = Histogram.of_record(record, self.exact)
        return list(histogram.quantile([q / 100 for q in self.percentiles], self.finite_only))


def _checked(percentiles: float | Sequence[float]) -> tuple[float, ...]:
    given = (percentiles,) if isinstance(percentiles, int | float) else tuple(percentiles)
    if not given or any(isinstance(q, bool | str) or not 0 <= q <= 100 for q in given):
        raise ConfigError(f"PercentileSubscriber needs percentiles between 0 and 100, got {percentiles!r}")
    if len({f"{q:g}" for q in given}) < len(given):
        raise ConfigError(f"PercentileSubscriber needs percentiles that differ from each other, got {percentiles!r}")
    return given
