"""How far training has carried a weight."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.inner import squared_distance, squared_norm
from ikkuna_subscribers._helpers.kept import Kept, require_parameter_kind

__all__ = ["DistanceFromInitSubscriber"]


class DistanceFromInitSubscriber(PlotSubscriber):
    r"""The distance of a weight from where it was first seen, :math:`\lVert W_t - W_0 \rVert_2`, and that over :math:`\lVert W_0 \rVert_2`.

    Takes weights, biases or other kinds a module has one of in a step.
    Publishes ``{kind}_distance_from_init``, in the unit of the weight, and ``{kind}_relative_distance``, without unit; both begin at 0.
    A weight that began at zero, as biases do, has a relative distance of NaN; a weight with a NaN or Inf has NaN for both.
    After a change of shape, dtype or device it begins again.  It keeps a copy of every tensor it takes.

    Look for: growth like the logarithm or the root of time; a jump is an instability,
    and a layer that stays near 0 beside others does not learn.

    Parameters
    ----------
    kind : str
        What to look at.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        For a kind that a module can have several of in a step.

    Examples
    --------
    >>> DistanceFromInitSubscriber().publishes
    ('weights_distance_from_init', 'weights_relative_distance')
    """

    def __init__(self, kind: str = "weights", **options: Any) -> None:
        require_parameter_kind("DistanceFromInitSubscriber", kind)
        name_results(options, f"{kind}_distance_from_init", f"{kind}_relative_distance")
        super().__init__(kind, **options)
        self._first = Kept()

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the squares of the distance and of the norm it began with, which add over the parts of a weight."""
        first = self._first.find(message)
        if first is None:
            self._first.keep(message)
            first = message.data
        return torch.stack([squared_distance(message.data, first), squared_norm(first)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit both."""
        moved, begin = map(math.sqrt, message.data)
        self.emit(message, moved, self.publishes[0])
        self.emit(message, moved / begin if begin else math.nan, self.publishes[1])
