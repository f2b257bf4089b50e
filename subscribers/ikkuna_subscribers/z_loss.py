"""The z-loss of logits."""

import math
from typing import Any

from torch import Tensor

from ikkuna.export.messages import Message, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.elements import readable
from ikkuna.numerics.z_loss import z_loss_row

__all__ = ["ZLossSubscriber"]

_LOGITS = "logits"


class ZLossSubscriber(PlotSubscriber):
    r"""The z-loss of logits, the mean of :math:`\ln^2 Z` over items.

    The normaliser of an item with the logits *z* is :math:`Z = \sum_c e^{z_c}`.
    Large models are trained with :math:`10^{-4}` times this value in their loss, so that logits do not drift;
    the metric measures it whether or not it is part of the loss, and needs no labels.

    Takes ``network_output`` or another kind with a tensor (…, classes); of a structured output it takes the field ``logits``,
    or the first tensor if that has at least two axes.
    Publishes ``{kind}_z_loss``, without unit, at least 0; over several calls and micro-batches it is the mean over all items together.
    An item with a NaN, plus infinity, or without a class makes it NaN.

    Look for: growth, which precedes spikes of the loss in half precision; about :math:`\ln^2 C` for C classes at the beginning.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    References
    ----------
    A. Chowdhery et al., PaLM: scaling language modeling with pathways, 2022, section 5.

    Examples
    --------
    >>> ZLossSubscriber().publishes
    ('network_output_z_loss',)
    """

    def __init__(self, kind: str = "network_output", **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_z_loss")
        super().__init__(kind, **options)

    def measure(self, message: Any) -> Tensor | None:
        """Return the sum over the items and their number."""
        x: Tensor = message.data
        is_of_network = isinstance(message, NetworkMessage)
        if is_of_network and message.path not in ("", _LOGITS):
            return None
        if x.ndim < 1 + is_of_network or not x.numel() or not x.is_floating_point() or (read := readable(x)) is None:
            return None
        return None if read[1] else z_loss_row(read[0])

    def compute(self, message: Message) -> None:
        """Emit the mean over the items."""
        total, items = message.data
        self.emit(message, total / items if items else math.nan)
