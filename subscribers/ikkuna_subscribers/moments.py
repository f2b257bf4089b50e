"""Metrics that are moments, norms and extrema of a tensor."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import MessageBatch, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, Quantity, SharedStatisticSubscriber
from ikkuna.numerics.elements import has_numbers, pieces, readable, without_repeats
from ikkuna.numerics.statistics.record import NORMS, Records
from ikkuna.numerics.statistics.table import Values
from ikkuna_subscribers._helpers import require_integers


class MeanSubscriber(SharedStatisticSubscriber):
    r"""The arithmetic mean of all elements of a tensor, :math:`\frac 1 n \sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_mean``, in the unit of x.
    Over several calls and micro-batches it is the mean of all elements together; a loss is weighted by its number of labels.
    An empty tensor publishes nothing; data with a NaN or Inf has mean NaN, unless `finite_only` is set.

    Look for: activations whose mean moves away from 0 from layer to layer.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> MeanSubscriber("activations").publishes
    ('activations_mean',)
    """

    quantity = Quantity(scale="signed")
    fields = ("mean",)
    accepts_finite_only = True
    results = ("mean",)
    derived = True

    def values(self, record: Records) -> tuple[Values, ...]:
        """Return the mean."""
        return (record.mean,)


class VarianceSubscriber(SharedStatisticSubscriber):
    r"""The variance of all elements of a tensor, :math:`\frac{1}{n - c} \sum_i (x_i - \bar x)^2` with correction c.

    Takes any kind with a tensor; publishes ``{kind}_variance``, in the squared unit of x.
    Over several calls and micro-batches it is the variance of all elements together, merged without cancellation.
    With n ≤ c it is NaN; data with a NaN or Inf has variance NaN, unless `finite_only` is set.

    Look for: activations whose variance grows or vanishes with depth, which indicates a poor initialisation.

    Parameters
    ----------
    kind : str
        The kind to measure.
    correction : int
        0 for the variance of these elements, 1 for Bessel's estimate of the variance of a population.
    **options : Any
        See `SharedStatisticSubscriber`.

    Raises
    ------
    ConfigError
        If `correction` is not an integer of at least 0.

    Examples
    --------
    >>> VarianceSubscriber("weights").publishes
    ('weights_variance',)
    """

    quantity = Quantity(low=0.0, scale="log")
    fields = ("m2", "sumsq")  # with the sum of squares the second moment costs little where the mean is small
    accepts_finite_only = True
    results = ("variance",)

    def __init__(self, kind: str, *, correction: int = 0, **options: Any) -> None:
        require_integers("VarianceSubscriber", 0, correction=correction)
        super().__init__(kind, **options)
        self.correction = correction

    def values(self, record: Records) -> tuple[Any, ...]:
        """Return the variance."""
        return (record.variance(self.correction),)


class SumSubscriber(SharedStatisticSubscriber):
    r"""The sum of all elements of a tensor, :math:`\sum_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_sum``, in the unit of x.
    Over several calls and micro-batches it is the sum over all of them; for a loss it is the weighted mean.
    An empty tensor publishes nothing; data with a NaN or Inf has sum NaN, unless `finite_only` is set.

    Look for: sums that should be 0 and are not, such as that of the gradient of a softmax's logits.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> SumSubscriber("layer_gradients").publishes
    ('layer_gradients_sum',)
    """

    quantity = Quantity(scale="signed")
    fields = ("mean",)
    accepts_finite_only = True
    results = ("sum",)
    derived = True

    def values(self, record: Records) -> tuple[Values, ...]:
        """Return the sum."""
        return (record.mean * record.count,)


class MinMaxSubscriber(SharedStatisticSubscriber):
    r"""The smallest and the largest element of a tensor, :math:`\min_i x_i` and :math:`\max_i x_i`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_min`` and ``{kind}_max``, in the unit of x.
    Over several calls and micro-batches they are the extrema of all elements together.
    Infinite elements count; the extrema of data with a NaN are NaN; an empty tensor publishes nothing.

    Look for: a maximum that grows much faster than the norm, which is one outlier; rectified outputs with maximum 0.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> MinMaxSubscriber("weights").publishes
    ('weights_min', 'weights_max')
    """

    quantity = Quantity(scale="signed")
    fields = ("min", "max")
    results = ("min", "max")
    derived = True

    def values(self, record: Records) -> tuple[Values, ...]:
        """Return both extrema."""
        return record.min, record.max


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

    quantity = Quantity(scale="signed")
    fields = ("m4", "finite_min", "finite_max")
    accepts_finite_only = True
    results = ("skewness", "kurtosis")

    def values(self, record: Records) -> tuple[Any, ...]:
        """Return both moments."""
        # The mean of equal numbers can have a rounding error, whose powers would be taken for moments.
        constant = record.finite_min == record.finite_max
        return np.where(constant, math.nan, record.skewness), np.where(constant, math.nan, record.kurtosis)


class SparsitySubscriber(SharedStatisticSubscriber):
    r"""The share of elements equal to zero, :math:`\#\{i : x_i = 0\} / n`.

    Takes any kind with a tensor; publishes ``{kind}_sparsity``, between 0 and 1.
    Over several calls and micro-batches it is the share of all elements together.
    Negative zero counts, NaN does not; zeros that a sparse tensor does not store count; an empty tensor publishes nothing.

    Look for: values between 0.5 and 0.9 are usual for rectified activations, a layer near 1 is dying;
    a gradient that is zero everywhere belongs to a layer that is frozen or dead, or whose gradient underflows.

    Its parameters are those of `SharedStatisticSubscriber`.

    Examples
    --------
    >>> SparsitySubscriber("activations", modules="*relu*").publishes
    ('activations_sparsity',)
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share")
    fields = ("zeros",)
    results = ("sparsity",)

    def values(self, record: Records) -> tuple[Values, ...]:
        """Return the share."""
        return (record.sparsity,)


class NormSubscriber(SharedStatisticSubscriber):
    r"""The p-norm of all elements of a tensor, :math:`\left(\sum_i |x_i|^p\right)^{1/p}`.

    For a matrix and p = 2 this is the Frobenius norm, not the spectral norm.
    p = 0 counts the elements that are not 0; p = ∞ is the largest magnitude.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_norm{p}``, in the unit of x.
    Over several calls and micro-batches it is the norm of all elements together.
    Data with a NaN or Inf has norm NaN, unless `finite_only` is set; then only p = ∞ is NaN without a finite element.
    An empty tensor publishes nothing.

    Look for: gradients that shrink or grow from layer to layer, and jumps of one layer over time.

    Parameters
    ----------
    kind : str
        The kind to measure.
    p : float
        The order of the norm, at least 0.
    finite_only : bool
        Whether NaN and infinite elements are left out.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `p` is negative or not a number.

    Examples
    --------
    >>> NormSubscriber("layer_gradients", subsample=10).publishes
    ('layer_gradients_norm2',)
    """

    quantity = Quantity(low=0.0, scale="log")
    accepts_finite_only = True
    derived = True
    measures: bool = False

    def __init__(self, kind: str, p: float = 2, *, finite_only: bool = False, **options: Any) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 0:
            raise ConfigError(f"NormSubscriber needs an order p >= 0, got {p!r}")
        self.results = (f"norm{p:g}",)
        super().__init__(kind, finite_only=finite_only, **options)
        self.p = p
        self.fields, self._property = NORMS.get(p, ((), ""))
        self.measures = not self.fields  # no shared statistic gives this norm

    def measure(self, message: Any) -> Tensor | None:
        r"""Return :math:`\sum |x_i|^p`, in float64."""
        if not has_numbers(message.data) or not message.data.numel():
            return None
        few, times = without_repeats(message.data)
        totals = [self._sum_of_powers(read[0]) for part in pieces(few) if (read := readable(part)) is not None]
        return (sum(totals[1:], totals[0]) * times).reshape(1) if totals else None

    def _sum_of_powers(self, x: Tensor) -> Tensor:
        x = x.double().abs()
        if self.finite_only:
            x = torch.where(torch.isfinite(x), x, 0)
        return torch.where(torch.isfinite(x).all(), x.pow(self.p).sum(), math.nan)

    def values(self, record: Any) -> tuple[Any, ...]:
        """Return the norms."""
        if self.fields:
            return (getattr(record, self._property),)
        if isinstance(record.data, np.ndarray):  # results of another subscriber
            return (np.abs(record.data),)
        return (np.ravel(record.data) ** (1 / self.p),)


class GlobalNormSubscriber(PlotSubscriber):
    r"""The L2 norm of a quantity over all modules together, :math:`\sqrt{\sum_l \lVert x_l \rVert_2^2}`.

    Takes one or several kinds with a tensor, and results of other subscribers, of which the square is summed.
    Publishes ``{kind}_global_norm`` of the whole network once a step, in the unit of x; several kinds are published under their common
    last word, or under their names joined by ``_``.
    A parameter shared by several modules counts once.  One NaN or Inf makes the norm NaN, unless `finite_only` is set.
    A step without a message publishes nothing.

    The norm that ``clip_grad_norm_`` clips is that of ``["weight_gradients", "bias_gradients"]``.
    Gradients are measured after clipping, so a curve at the threshold means that every step is clipped.

    Look for: jumps to ten times the usual value, which precede a loss spike; a slow fall to 0.

    Parameters
    ----------
    kinds : str or list of str
        The kinds to measure.
    finite_only : bool
        Whether NaN and infinite elements are left out.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `kinds` is empty.

    Examples
    --------
    >>> GlobalNormSubscriber(["weight_gradients", "bias_gradients"]).publishes
    ('gradients_global_norm',)
    """

    quantity = Quantity(low=0.0, scale="log")
    fields = ("sumsq",)
    derived = True
    of_network = True

    def __init__(
        self,
        kinds: str | Iterable[str] = ("weight_gradients", "bias_gradients"),
        *,
        finite_only: bool = False,
        **options: Any,
    ) -> None:
        names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if not names:
            raise ConfigError("GlobalNormSubscriber needs at least one kind, got an empty list")
        options.setdefault("publishes", f"{_common_name(names)}_global_norm")
        super().__init__(names, **options)
        self.finite_only = finite_only
        self._norms: list[float] = []

    def compute_batch(self, batch: MessageBatch) -> None:
        """Store the norms of all tensors of a kind until the step is over."""
        self._norms += batch.records.l2_norm.tolist()

    def finish(self, stamp: Stamp) -> None:
        """Emit the norm of all tensors of the step."""
        norms, self._norms = self._norms, []
        if norms:
            self.emit(NetworkMessage(stamp, self.publishes[0]), math.hypot(*norms), self.publishes[0])


def _common_name(names: tuple[str, ...]) -> str:
    words = {str(name).rsplit("_", 1)[-1] for name in names}
    return words.pop() if len(words) == 1 < len(names) else "_".join(map(str, names))


class MessageMeanSubscriber(PlotSubscriber):
    r"""The mean over the L modules of a network, :math:`\frac 1 L \sum_l y_l`, with equal weights.

    Takes other subscribers' results, of which :math:`y_l` is the value, and any kind with a tensor, of which it is the mean element.
    Publishes ``{kind}_message_mean`` of the whole network once a step, in the unit of the kind.
    A module with several parameters counts once for each; one NaN makes the mean NaN; a step without a message publishes nothing.

    Look for: the same as in the kind itself, in one curve.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> MessageMeanSubscriber("weight_updates_weights_ratio").publishes
    ('weight_updates_weights_ratio_message_mean',)
    """

    quantity = Quantity(scale="signed")
    fields = ("mean",)
    derived = True
    of_network = True

    def __init__(self, kind: str, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_message_mean")
        super().__init__(kind, **options)
        self._values: list[float] = []

    def compute_batch(self, batch: MessageBatch) -> None:
        """Store the values of all modules until the step is over."""
        self._values += batch.records.mean.tolist()

    def finish(self, stamp: Stamp) -> None:
        """Emit the mean of the values of the step."""
        values, self._values = self._values, []
        if values:
            self.emit(NetworkMessage(stamp, self.publishes[0]), sum(values) / len(values))
