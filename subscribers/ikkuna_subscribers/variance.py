"""The spread of a tensor."""

from typing import Any

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["VarianceSubscriber"]


class VarianceSubscriber(PlotSubscriber):
    r"""The variance of all elements of a tensor, :math:`\frac{1}{n - c} \sum_i (x_i - \bar x)^2` with correction c.

    Takes any kind with a tensor; publishes ``{kind}_variance``, in the squared unit of x.
    Over several calls and micro-batches it is the variance of all elements together, merged without cancellation.
    With n ≤ c it is NaN; data with a NaN or Inf has variance NaN, unless `finite_only`.

    Look for: activations whose variance grows or dies with depth, the sign of a poor initialisation.

    Parameters
    ----------
    kind : str
        What to look at.
    correction : int
        0 for the spread of these elements (the default), 1 for Bessel's estimate of a population's.
    finite_only : bool
        Leave out elements that are NaN or infinite.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `correction` is not a whole number at least 0.

    Examples
    --------
    >>> VarianceSubscriber("weights").publishes
    ('weights_variance',)
    """

    fields = ("m2", "sumsq")  # the sum of squares makes the second moment nearly free where the mean is small

    def __init__(self, kind: str, *, correction: int = 0, finite_only: bool = False, **options: Any) -> None:
        if isinstance(correction, bool) or not isinstance(correction, int) or correction < 0:
            raise ConfigError(f"VarianceSubscriber needs a correction >= 0, got {correction!r}")
        options.setdefault("publishes", f"{kind}_variance")
        super().__init__(kind, **options)
        self.correction = correction
        self.finite_only = finite_only

    def compute(self, message: ModuleMessage) -> None:
        """Emit the variance."""
        assert message.record is not None
        self.emit(message, message.record.variance(self.correction))
