"""The loss of a tensor in a narrower number format."""

import math
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.precision import FORMATS, histogram_shares
from ikkuna.numerics.statistics import Record
from ikkuna.numerics.statistics.histogram import Histogram

__all__ = ["PrecisionSubscriber"]


class PrecisionSubscriber(SharedStatisticSubscriber):
    """The shares of a tensor :math:`s x` that a float format would round to 0, store with fewer bits, or be unable to store.

    Of the finite elements that are not 0, *underflow* is the share that rounds to 0
    and *subnormal* the share below the smallest normal number; of the finite elements, *overflow* is the share beyond the largest number.
    They are computed from a histogram of leading bits (see `HistogramSubscriber`): exactly if a threshold is a power of two,
    by interpolation within an eighth of the threshold if the overflow of a format is not.

    Takes any kind with a tensor; publishes ``{kind}_{format}_underflow``, ``{kind}_{format}_subnormal`` and ``{kind}_{format}_overflow``,
    all between 0 and 1, NaN without an element to divide by; an empty tensor publishes nothing.
    Over several calls and micro-batches they are those of all elements together.

    Look for: gradients with more than 5 to 10 % underflow need a loss scale; with any overflow, a smaller one.

    Parameters
    ----------
    kind : str
        The kind to measure.
    format : {'fp16', 'bf16', 'e4m3', 'e5m2'}
        The number format.
    scale : float
        :math:`s > 0`, the factor applied before storing.
    exact : bool
        Whether all elements are counted, which costs about five sums over them.
        By default a random sample of 65,536 is counted, which can miss a rare overflow.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the format is unknown, or the scale is not positive and finite.

    References
    ----------
    P. Micikevicius et al., FP8 formats for deep learning, 2022.

    Examples
    --------
    >>> PrecisionSubscriber("weight_gradients", "e5m2").publishes
    ('weight_gradients_e5m2_underflow', 'weight_gradients_e5m2_subnormal', 'weight_gradients_e5m2_overflow')
    """

    def __init__(
        self, kind: str, format: str = "fp16", *, scale: float = 1.0, exact: bool = False, **options: Any
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"PrecisionSubscriber needs one of the formats {', '.join(FORMATS)}, got {format!r}")
        if not 0 < scale < math.inf:
            raise ConfigError(f"PrecisionSubscriber needs a scale above 0, got {scale!r}")
        super().__init__(
            kind, results=[f"{format}_{loss}" for loss in ("underflow", "subnormal", "overflow")], **options
        )
        self.format = format
        self.scale = scale
        self.exact = exact
        self.fields = ("codes", "zeros", "min", "max") if exact else ("sampled_codes", "min", "max")

    def values(self, record: Record) -> tuple[float, float, float]:
        """Return the three shares."""
        found = histogram_shares(Histogram.of_record(record, self.exact), self.format, self.scale)
        return found.underflow, found.subnormal, found.overflow
