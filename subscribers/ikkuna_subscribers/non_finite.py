"""How much of a tensor is no number any more."""

from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["NonFiniteSubscriber"]


class NonFiniteSubscriber(PlotSubscriber):
    r"""The number of elements that are NaN or infinite, :math:`\#\{i : x_i \in \{\mathrm{NaN}, \pm\infty\}\}`.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_nonfinite``, a count, at least 0.
    Over several calls and micro-batches it is the count over all of them; of a loss it is 0 or 1.
    Unlike other metrics it also publishes for steps that a gradient scaler skipped, which are skipped for such elements.
    An empty tensor publishes nothing.

    Look for: anything above 0.  In the forward direction the first layer that shows it made it, in the backward direction the last one.

    Parameters
    ----------
    kind : str
        What to look at.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> NonFiniteSubscriber("weight_gradients").publishes
    ('weight_gradients_nonfinite',)
    """

    fields = ("nans", "infs")
    derived = True
    sees_skipped = True

    def __init__(self, kind: str, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_nonfinite")
        super().__init__(kind, **options)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the count."""
        assert message.record is not None
        self.emit(message, message.record.nonfinite)
