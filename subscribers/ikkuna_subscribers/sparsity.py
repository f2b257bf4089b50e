"""How much of a tensor is zero."""

from typing import Any

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["SparsitySubscriber"]


class SparsitySubscriber(PlotSubscriber):
    r"""The share of elements equal to zero, :math:`\#\{i : x_i = 0\} / n`.

    Takes any kind with a tensor; publishes ``{kind}_sparsity``, between 0 and 1.
    Over several calls and micro-batches it is the share of all elements together.
    Negative zero is zero, NaN is not; zeros that a sparse tensor does not store count; an empty tensor publishes nothing.

    Look for: rectified activations between 0.5 and 0.9 are usual, near 1 the layer is dying;
    a gradient that is zero everywhere belongs to a layer that is frozen, dead or underflows.

    Parameters
    ----------
    kind : str
        What to look at.
    **options
        See `Subscriber`.

    Examples
    --------
    >>> SparsitySubscriber("activations", modules="*relu*").publishes
    ('activations_sparsity',)
    """

    fields = ("zeros",)

    def __init__(self, kind: str, **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_sparsity")
        super().__init__(kind, **options)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        assert message.record is not None
        self.emit(message, message.record.sparsity)
