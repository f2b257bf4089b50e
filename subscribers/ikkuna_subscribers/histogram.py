"""The distribution of a tensor, as a picture."""

from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.statistics.histogram import Histogram

__all__ = ["HistogramSubscriber"]


class HistogramSubscriber(PlotSubscriber):
    r"""The histogram of all elements of a tensor, in TensorBoard's tabs Histograms and Distributions.

    Elements are counted by their leading bits, sign, exponent and three of the mantissa: 4,096 bins whatever the range,
    each an eighth of its value wide.  For display they are spread over buckets of equal width between the extrema.

    Takes any kind with a tensor and shows it under ``{kind}/{module}``, in the unit of x; it publishes nothing, a result being a number.
    Over several calls and micro-batches it is the histogram of all elements together.
    NaN and infinite elements are left out (see `NonFiniteSubscriber`); without a finite element nothing is shown.

    Look for: weights that pile up at 0 or at a clip; activations that leave the range where their function bends.

    Parameters
    ----------
    kind : str
        What to look at.
    bins : int
        Number of buckets shown, 1 to 1,000.
    exact : bool
        Count all elements, at the cost of about five sums over them, rather than a random 65,536.
    subsample : int
        Show every so-many-th step; 100 by default, since a picture costs a hundred numbers.
    **options
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
        self.fields = ("codes" if exact else "sampled_codes", "min", "max")

    def compute(self, message: ModuleMessage) -> None:
        """Show the histogram."""
        assert message.record is not None
        buckets = Histogram.of_record(message.record, self.exact).tensorboard_buckets(self.bins)
        if buckets.num:
            self.show(message, buckets)
