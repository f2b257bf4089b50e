"""The shape of a distribution: how lopsided and how heavy-tailed it is."""

import math
from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna_subscribers._helpers.naming import name_results

__all__ = ["MomentsSubscriber"]


class MomentsSubscriber(PlotSubscriber):
    r"""Skewness :math:`g_1 = \sqrt n\, M_3 / M_2^{3/2}` and excess kurtosis :math:`g_2 = n M_4 / M_2^2 - 3` of all elements.

    Here :math:`M_k = \sum_i (x_i - \bar x)^k`; these are the population's, as ``scipy.stats.skew`` and ``kurtosis`` give them.
    Takes any kind with a tensor; publishes ``{kind}_skewness`` and ``{kind}_kurtosis``, without unit, the latter at least -2.
    Over several calls and micro-batches they are those of all elements together, merged without cancellation.
    Constant data has neither, they are NaN; so are those of data with a NaN or Inf, unless `finite_only`.
    An empty tensor publishes nothing.

    Look for: both are 0 for a normal distribution.  Activations with a kurtosis far above 10 have outlier features,
    which narrow number formats do not survive; gradients have 10 to 100 late in training.

    Parameters
    ----------
    kind : str
        What to look at.
    finite_only : bool
        Leave out elements that are NaN or infinite.
    **options
        See `Subscriber`.

    References
    ----------
    P. Pébay, Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments, 2008.

    Examples
    --------
    >>> MomentsSubscriber("activations").publishes
    ('activations_skewness', 'activations_kurtosis')
    """

    fields = ("m4", "min", "max")

    def __init__(self, kind: str, *, finite_only: bool = False, **options: Any) -> None:
        name_results(options, f"{kind}_skewness", f"{kind}_kurtosis")
        super().__init__(kind, **options)
        self.finite_only = finite_only

    def compute(self, message: ModuleMessage) -> None:
        """Emit both."""
        record = message.record
        assert record is not None
        # The mean of equal numbers may be off by a rounding error, whose powers would pass for a distribution.
        constant = record.min == record.max
        values = (math.nan, math.nan) if constant else (record.skewness, record.kurtosis)
        for kind, value in zip(self.publishes, values, strict=True):
            self.emit(message, value, kind)
