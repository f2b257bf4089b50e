"""Statistics of the rows of a tensor, averaged over rows."""

from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.rows import ROW_STATISTICS, row_means, row_sums

__all__ = ["RowsSubscriber"]


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
