"""The number of directions in which the outputs of a layer differ."""

from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.representation.dimension import dimension
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["DimensionSubscriber"]


class DimensionSubscriber(PlotSubscriber):
    r"""The participation ratio of the covariance of a layer's units.

    The formula is that of :func:`~ikkuna.numerics.representation.dimension.dimension`.

    Takes any kind with a tensor; publishes ``{kind}_dimension``, between 1 and the number of units, the mean over the calls of a step.
    At most `rows` positions of a call are read.  With several ranks it is the mean of the figures of their data.
    A step in which a call has fewer than four rows, equal rows, a NaN or an Inf is NaN.

    Look for: hidden layers that fall towards 1, although the network tells several classes apart; large units can hide the others,
    as in residual streams of large language models.

    Parameters
    ----------
    kind : str
        The kind to measure.
    rows : int
        The number of rows that are read.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> DimensionSubscriber().publishes
    ('activations_dimension',)
    """

    def __init__(self, kind: str = "activations", *, rows: int = 64, **options: Any) -> None:
        require_integers("DimensionSubscriber", least=4, rows=rows)
        name_results(options, f"{kind}_dimension")
        super().__init__(kind, **options)
        self.rows = rows

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the participation ratio and 1, the number of calls."""
        if message.data.ndim < 2 or not message.data.numel():
            return None
        value = dimension(message.data, self.rows)
        return torch.stack([value, torch.ones_like(value)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the mean over the calls."""
        total, calls = message.data
        self.emit(message, float(total / calls))
