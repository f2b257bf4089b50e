"""The distribution of a tensor as a picture."""

from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.messages.batch import MessageBatch
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.statistics.histogram import Histogram
from ikkuna.numerics.statistics.histograms import Histograms

__all__ = ["HistogramSubscriber"]


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
        Whether all elements are counted, which costs about five sums over them; by default a random sample of 65,536 is counted.
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
        if isinstance(bins, bool) or not isinstance(bins, int) or not 1 <= bins <= 1000:
            raise ConfigError(f"HistogramSubscriber needs a number of bins between 1 and 1000, got {bins!r}")
        super().__init__(kind, subsample=subsample, **options)
        self.bins = bins
        self.exact = exact
        self.fields = ("codes" if exact else "sampled_codes", "finite_min", "finite_max")

    def compute(self, message: ModuleMessage) -> None:
        """Show the histogram."""
        assert message.record is not None
        buckets = Histogram.of_record(message.record, self.exact).tensorboard_buckets(self.bins)
        if buckets.num:
            self.show(message, buckets)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Show the histograms of all modules."""
        found = Histograms.of_records(batch.records, self.exact).tensorboard_buckets(self.bins)
        self.show_batch(batch, [buckets if buckets.num else None for buckets in found])
