"""Percentiles of a tensor."""

from collections.abc import Sequence
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna_subscribers._helpers.naming import name_results

__all__ = ["SIGMA_PERCENTILES", "PercentileSubscriber"]

SIGMA_PERCENTILES = (0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87)
"""Where a normal distribution is -3, -2, … 3 standard deviations from its mean."""


class PercentileSubscriber(PlotSubscriber):
    r"""Values below which given percentages of the elements of a tensor lie.

    The percentile *q* lies at rank :math:`(n - 1) q / 100` of the ordered elements, between two of them by linear interpolation,
    as ``numpy.percentile`` has it.  It is found from counts by leading bits (see `HistogramSubscriber`),
    which put it within an eighth of its value of the exact one; the 0th and the 100th are exact.

    Takes any kind with a tensor; publishes ``{kind}_percentile_{q}`` for each, in the unit of x.
    Over several calls and micro-batches they are those of all elements together.
    Infinite elements have their place in the order; data with a NaN has percentiles NaN; `finite_only` leaves both out.
    An empty tensor publishes nothing.

    Look for: the fan of the seven default percentiles is evenly spaced for a normal distribution;
    one that opens upwards only, or closes on one value, says how a layer goes wrong where its norm says that it does.

    Parameters
    ----------
    kind : str
        What to look at.
    percentiles : number or sequence of numbers
        In [0, 100], all different; by default those of -3 to 3 standard deviations of a normal distribution.
    exact : bool
        Count all elements, at the cost of about five sums over them, rather than a random 65,536,
        of which the share below a percentile is known to 0.2 %.
    finite_only : bool
        Leave out elements that are NaN or infinite.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `percentiles` are none, out of range or the same.

    Examples
    --------
    >>> PercentileSubscriber("weights", percentiles=[2.28, 50]).publishes
    ('weights_percentile_2.28', 'weights_percentile_50')
    """

    def __init__(
        self,
        kind: str,
        percentiles: float | Sequence[float] = SIGMA_PERCENTILES,
        *,
        exact: bool = False,
        finite_only: bool = False,
        **options: Any,
    ) -> None:
        self.percentiles = _checked(percentiles)
        name_results(options, *(f"{kind}_percentile_{q:g}" for q in self.percentiles))
        super().__init__(kind, **options)
        self.exact = exact
        self.finite_only = finite_only
        self.fields = ("codes" if exact else "sampled_codes", "min", "max")

    def compute(self, message: ModuleMessage) -> None:
        """Emit each percentile."""
        assert message.record is not None
        histogram = Histogram.of_record(message.record, self.exact)
        values = histogram.quantile([q / 100 for q in self.percentiles], self.finite_only)
        for kind, value in zip(self.publishes, values, strict=True):
            self.emit(message, value, kind)


def _checked(percentiles: float | Sequence[float]) -> tuple[float, ...]:
    given = (percentiles,) if isinstance(percentiles, int | float) else tuple(percentiles)
    if not given or any(isinstance(q, bool | str) or not 0 <= q <= 100 for q in given):
        raise ConfigError(f"PercentileSubscriber needs percentiles between 0 and 100, got {percentiles!r}")
    if len({f"{q:g}" for q in given}) < len(given):
        raise ConfigError(f"PercentileSubscriber needs percentiles that differ from each other, got {percentiles!r}")
    return given
