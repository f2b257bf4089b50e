"""Metrics of the distribution of the elements of a tensor."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError, is_integer
from ikkuna.export.messages import Message, MessageBatch, ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, SharedStatisticSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.geometry import ROW_STATISTICS, row_means, row_sums
from ikkuna.numerics.precision import FORMATS, QUANTIZED_FORMATS, count_losses, quantization_errors, shares
from ikkuna.numerics.statistics import Record
from ikkuna.numerics.statistics.float_code import SAMPLE, sample
from ikkuna.numerics.statistics.histogram import SIGMA, Buckets, Histograms
from ikkuna.numerics.statistics.record import Records
from ikkuna_subscribers._helpers import require_integers


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

    quantity: Quantity | Sequence[Quantity] = Quantity(scale="signed")
    accepts_finite_only = True

    def __init__(
        self,
        kind: str,
        percentiles: float | Sequence[float] = SIGMA,
        *,
        exact: bool = False,
        **options: Any,
    ) -> None:
        self.percentiles = _checked(percentiles)
        self.results = [f"percentile_{q:g}" for q in self.percentiles]
        super().__init__(kind, **options)
        family = f"{kind}_percentile"
        self.quantity = [Quantity(scale="signed", family=family, level=q) for q in self.percentiles]
        self.exact = exact
        self.fields = ("codes" if exact else "sampled_codes", "finite_min", "finite_max")

    def values(self, record: Records) -> list[Any]:
        """Return the percentiles."""
        histograms = Histograms.of_records(record, self.exact)
        return list(histograms.quantile([q / 100 for q in self.percentiles], self.finite_only))


def _checked(percentiles: float | Sequence[float]) -> tuple[float, ...]:
    given = (percentiles,) if isinstance(percentiles, int | float) else tuple(percentiles)
    if not given or any(isinstance(q, bool | str) or not 0 <= q <= 100 for q in given):
        raise ConfigError(f"PercentileSubscriber needs percentiles between 0 and 100, got {percentiles!r}")
    if len({f"{q:g}" for q in given}) < len(given):
        raise ConfigError(f"PercentileSubscriber needs percentiles that differ from each other, got {percentiles!r}")
    return given


class HistogramSubscriber(PlotSubscriber):
    """The histogram of all elements of a tensor, for TensorBoard's tabs Histograms and Distributions.

    Elements are counted by their leading bits: sign, exponent and three bits of the mantissa.
    This gives 4,096 bins for every range of values, each one eighth of its value wide.
    For display the counts are distributed over buckets of equal width between the extrema.

    Takes any kind with a tensor and shows it under ``{kind}/{module}``, in the unit of x; it publishes nothing.
    Over several calls and micro-batches it is the histogram of all elements together.
    NaN and infinite elements are left out (see `NonFiniteSubscriber`); without a finite element nothing is shown.

    Look for: weights that accumulate at 0 or at a clipping limit; activations outside the range in which their function is nonlinear.

    Parameters
    ----------
    kind : str
        The kind to measure.
    bins : int
        The number of buckets shown, 1 to 1,000.
    exact : bool
        Whether all elements are counted, which costs about five sums over them; by default a random sample of 65,536 is counted,
        and the sums that TensorBoard shows come from the middles of the bins.
    subsample : int
        The number of steps from one histogram to the next; 100 by default, because a histogram costs as much as a hundred numbers.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `bins` is out of range.

    Examples
    --------
    >>> HistogramSubscriber("weights", bins=50).publishes
    ()
    """

    def __init__(self, kind: str, *, bins: int = 30, exact: bool = False, subsample: int = 100, **options: Any) -> None:
        if not is_integer(bins, 1) or bins > 1000:
            raise ConfigError(f"HistogramSubscriber needs a number of bins between 1 and 1000, got {bins!r}")
        super().__init__(kind, subsample=subsample, **options)
        self.bins = bins
        self.exact = exact
        sums = ("n", "mean", "sumsq") if exact else ()
        self.fields = ("codes" if exact else "sampled_codes", "finite_min", "finite_max", *sums)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Show the histograms of all modules."""
        found = Histograms.of_records(batch.records, self.exact).tensorboard_buckets(self.bins)
        records = map(batch.records.__getitem__, range(len(found))) if self.exact else repeat(None)
        pairs = zip(found, records, strict=False)
        self.show_batch(batch, [self._summed(buckets, record) if buckets.num else None for buckets, record in pairs])

    def _summed(self, buckets: Buckets, record: Record | None) -> Buckets:
        """Return a histogram with the sums of all elements, if these are measured and finite."""
        if record is None or record.sumsq is None or not math.isfinite(record.sumsq):
            return buckets
        return replace(buckets, sum=record.mean * record.n, sum_squares=record.sumsq)


class RowsSubscriber(PlotSubscriber):
    r"""Statistics of each row of a tensor along its last axis, such as the features of a token, averaged over all rows.

    They are the L2 norm, the mean :math:`\mu`, the largest element, the skewness :math:`m_3 / m_2^{3/2}` and the kurtosis
    :math:`m_4 / m_2^2` of a row, with its central moments :math:`m_k`.
    The norm, mean, maximum and kurtosis are those of the ``ActivationMonitor`` of Composer; the kurtosis of a normal distribution is 3.
    Rows whose elements are all equal have no skewness and no kurtosis and are left out of these two averages.

    Takes any kind with a tensor; publishes ``{kind}_row_l2_norm``, ``{kind}_row_mean`` and ``{kind}_row_max`` in the unit of the tensor,
    and ``{kind}_row_skewness`` and ``{kind}_row_kurtosis``, without unit.
    Over several calls and micro-batches they are averages over all rows together; a NaN or Inf makes them NaN.
    A tensor without axes and an empty tensor publish nothing.  It costs about twenty sums over the tensor.

    Look for: a kurtosis that grows far above 10, because a few features are then much larger than the others,
    which makes the layer hard to quantise; norms that grow from layer to layer.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> RowsSubscriber(subsample=25).publishes[:2]
    ('activations_row_l2_norm', 'activations_row_mean')
    """

    quantity = (
        Quantity(low=0.0, scale="log"),
        Quantity(scale="signed"),
        Quantity(scale="signed"),
        Quantity(scale="signed"),
        Quantity(scale="signed"),
    )

    def __init__(self, kind: str = "activations", **options: Any) -> None:
        name_results(options, *(f"{kind}_row_{statistic}" for statistic in ROW_STATISTICS))
        super().__init__(kind, **options)

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the sums of the statistics over the rows."""
        x: Tensor = message.data
        if not x.ndim or not x.numel() or x.layout is not torch.strided or (read := readable(x)) is None:
            return None
        return row_sums(read[0])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the averages."""
        for kind, value in zip(self.publishes, row_means(torch.from_numpy(message.data)).tolist(), strict=True):
            self.emit(message, value, kind)


class PrecisionSubscriber(PlotSubscriber):
    """The shares of a tensor :math:`s x` that a float format would round to 0, store with fewer bits, or be unable to store.

    Of the finite elements that are not 0, *underflow* is the share that rounds to 0
    and *subnormal* the share below the smallest normal number; of the finite elements, *overflow* is the share beyond the largest number.
    Elements are classified as a cast with rounding to nearest, ties to even, would do; a saturating cast counts as overflow.

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
        Whether all elements are counted, which costs about ten sums over them.
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

    quantity = Quantity(low=0.0, high=1.0, scale="share", zero="good", larger="bad")
    state = ("_generators",)

    def __init__(
        self, kind: str, format: str = "fp16", *, scale: float = 1.0, exact: bool = False, **options: Any
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"PrecisionSubscriber needs one of the formats {', '.join(FORMATS)}, got {format!r}")
        if not 0 < scale < math.inf:
            raise ConfigError(f"PrecisionSubscriber needs a scale above 0, got {scale!r}")
        name_results(options, *(f"{kind}_{format}_{loss}" for loss in ("underflow", "subnormal", "overflow")))
        super().__init__(kind, **options)
        self.format = format
        self.scale = scale
        self.exact = exact
        self._generators: dict[torch.device, torch.Generator] = {}

    def measure(self, message: Any) -> Tensor | None:
        """Return the counts of :func:`~ikkuna.numerics.precision.count_losses`; those of a sample are scaled to all elements."""
        x: Tensor = message.data
        if readable(x) is None or not x.numel():
            return None
        if self.exact or x.numel() <= SAMPLE or x.layout is not torch.strided:
            return count_losses(x, self.format, self.scale).double()
        generator = self._generators.get(x.device)
        if generator is None:
            generator = self._generators[x.device] = torch.Generator(x.device).manual_seed(0)
        counts = count_losses(sample(x, generator), self.format, self.scale)
        return counts.double() * (x.numel() / SAMPLE)

    def compute(self, message: Message) -> None:
        """Emit the three shares."""
        found = shares(torch.from_numpy(message.data))
        for kind, value in zip(self.publishes, (found.underflow, found.subnormal, found.overflow), strict=True):
            self.emit(message, value, kind)


class QuantizationSubscriber(PlotSubscriber):
    r"""The largest magnitude of a tensor, and the relative error of rounding it to eight bits.

    The error is :math:`\lVert Q(x) - x \rVert_2 / \lVert x \rVert_2`, with the rounded elements :math:`Q(x)`.
    Elements are scaled so that the largest magnitude becomes the largest number of the format, and rounded to nearest, ties to even.
    One error is that with one scale for the tensor, the other that with one scale for each channel.

    Takes any kind with a tensor; publishes ``{kind}_amax`` in the unit of the tensor, ``{kind}_{format}_error`` and
    ``{kind}_{format}_channel_error``, without unit.
    Over several calls and micro-batches the errors are those of all elements, each call with its own scales.
    A tensor of zeros has no error, and a NaN or Inf makes all values NaN; an empty tensor publishes nothing.
    By default it samples every hundredth step, because a sample costs several times as much as a step of a small network.

    Look for: about 0.03 for ``e4m3`` and 0.05 for ``e5m2``; an error with one scale far above that with channels comes from outliers.

    Parameters
    ----------
    kind : str
        The kind to measure.
    format : {'e4m3', 'e5m2', 'int8'}
        The number format.
    channel_axis : int
        The axis of channels; a tensor without it publishes nothing.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the format is unknown, or `channel_axis` is not an integer.

    Examples
    --------
    >>> QuantizationSubscriber("weights", "int8").publishes
    ('weights_amax', 'weights_int8_error', 'weights_int8_channel_error')
    """

    quantity = Quantity(low=0.0, scale="log")
    fields = ("min", "max")

    def __init__(self, kind: str = "weights", format: str = "e4m3", *, channel_axis: int = 0, **options: Any) -> None:
        if format not in QUANTIZED_FORMATS:
            known = ", ".join(QUANTIZED_FORMATS)
            raise ConfigError(f"QuantizationSubscriber needs one of the formats {known}, got {format!r}")
        require_integers("QuantizationSubscriber", least=-8, channel_axis=channel_axis)
        name_results(options, f"{kind}_amax", f"{kind}_{format}_error", f"{kind}_{format}_channel_error")
        options.setdefault("subsample", 100)
        super().__init__(kind, **options)
        self.format = format
        self.channel_axis = channel_axis

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the sums of :func:`~ikkuna.numerics.precision.quantization_errors`."""
        x: Tensor = message.data
        if x.layout is not torch.strided or not x.numel() or (read := readable(x)) is None:
            return None
        if x.ndim and not -x.ndim <= self.channel_axis < x.ndim:
            return None
        return quantization_errors(read[0], self.format, self.channel_axis)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the largest magnitude and both errors."""
        record = message.record
        assert record is not None
        assert record.min is not None
        assert record.max is not None
        errors = message.data
        largest = max(abs(record.min), abs(record.max)) if math.isfinite(errors[2]) else math.nan
        relative = [math.sqrt(error / errors[2]) if errors[2] else 0.0 for error in errors[:2]]
        for kind, value in zip(self.publishes, (largest, *relative), strict=True):
            self.emit(message, value, kind)
