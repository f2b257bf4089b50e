"""The skewness and the kurtosis of a tensor."""

import math
from typing import Any

import numpy as np

from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.statistics import Record

__all__ = ["MomentsSubscriber"]


class MomentsSubscriber(SharedStatisticSubscriber):
    r"""Skewness :math:`g_1 = \sqrt n\, M_3 / M_2^{3/2}` and excess kurtosis :math:`g_2 = n M_4 / M_2^2 - 3` of all elements.

    Here :math:`M_k = \sum_i (x_i - \bar x)^k`; the values agree with ``scipy.stats.skew`` and ``scipy.stats.kurtosis``.
    Takes any kind with a tensor; publishes ``{kind}_skewness`` and ``{kind}_kurtosis``, without unit, the latter at least -2.
    Over several calls and micro-batches they are those of all elements together, merged without cancellation.
    Both are NaN for constant data, and for data with a NaN or Inf unless `finite_only` is set.
    An empty tensor publishes nothing.

    Look for: both are 0 for a normal distribution.  Activations with a kurtosis far above 10 have outlier features,
    which narrow number formats cannot represent; gradients have 10 to 100 late in training.

    Its parameters are those of `SharedStatisticSubscriber`.

    References
    ----------
    P. Pébay, Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments, 2008.

    Examples
    --------
    >>> MomentsSubscriber("activations").publishes
    ('activations_skewness', 'activations_kurtosis')
    """

    fields = ("m4", "finite_min", "finite_max")
    accepts_finite_only = True
    results = ("skewness", "kurtosis")

    def values(self, record: Record) -> tuple[Any, Any]:
        """Return both moments."""
        # The mean of equal numbers can have a rounding error, whose powers would be taken for moments.
        constant = record.finite_min == record.finite_max
        return np.where(constant, math.nan, record.skewness), np.where(constant, math.nan, record.kurtosis)
