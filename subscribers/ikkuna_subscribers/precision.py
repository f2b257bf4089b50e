"""What a narrower number format would lose of a tensor."""

import math
from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.precision import FORMATS, histogram_shares
from ikkuna.numerics.statistics.histogram import Histogram

__all__ = ["PrecisionSubscriber"]


class PrecisionSubscriber(PlotSubscriber):
    r"""The shares of a tensor that a float format would turn into 0, hold with fewer bits, or not hold, were :math:`s x` stored in it.

    Of the finite elements that are not 0, *underflow* is the share that rounds to 0
    and *subnormal* that below the smallest normal number; of the finite elements, *overflow* is the share beyond the largest number.
    They are found from counts by leading bits (see `HistogramSubscriber`): exact where a threshold is a power of two,
    interpolated within an eighth of the threshold where the overflow of a format is not.

    Takes any kind with a tensor; publishes ``{kind}_{format}_underflow``, ``{kind}_{format}_subnormal`` and ``{kind}_{format}_overflow``,
    all between 0 and 1, NaN where there is nothing to divide by; an empty tensor publishes nothing.
    Over several calls and micro-batches they are those of all elements together.

    Look for: gradients with more than 5 to 10 % underflow need a loss scale, with any overflow a smaller one.

    Parameters
    ----------
    kind : str
        What to look at.
    format : {'fp16', 'bf16', 'e4m3', 'e5m2'}
        The format that is considered.
    scale : float
        :math:`s > 0`, what is multiplied before storing.
    exact : bool
        Count all elements, at the cost of about five sums over them, rather than a random 65,536, which may miss a rare overflow.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        For another format, or a scale that is not positive and finite.

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
            raise ConfigError(f"PrecisionSubscriber knows the formats {', '.join(FORMATS)}, got {format!r}")
        if not 0 < scale < math.inf:
            raise ConfigError(f"PrecisionSubscriber needs a scale above 0, got {scale!r}")
        name_results(options, *(f"{kind}_{format}_{what}" for what in ("underflow", "subnormal", "overflow")))
        super().__init__(kind, **options)
        self.format = format
        self.scale = scale
        self.exact = exact
        self.fields = ("codes", "zeros", "min", "max") if exact else ("sampled_codes", "min", "max")

    def compute(self, message: ModuleMessage) -> None:
        """Emit the three shares."""
        assert message.record is not None
        found = histogram_shares(Histogram.of_record(message.record, self.exact), self.format, self.scale)
        for kind, value in zip(self.publishes, (found.underflow, found.subnormal, found.overflow), strict=True):
            self.emit(message, value, kind)
