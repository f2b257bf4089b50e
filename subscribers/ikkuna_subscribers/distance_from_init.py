"""The distance of a weight from its initial value."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.inner import squared_distance, squared_norm
from ikkuna_subscribers._helpers.tensor_copies import TensorCopies, require_parameter_kind

__all__ = ["DistanceFromInitSubscriber"]


class DistanceFromInitSubscriber(PlotSubscriber):
    r"""The distance of a weight from its first recorded value, :math:`\lVert W_t - W_0 \rVert_2`.

    The relative distance is this distance over :math:`\lVert W_0 \rVert_2`.

    Takes weights, biases or other kinds with one tensor per parameter and step.
    Publishes ``{kind}_distance_from_init``, in the unit of the weight, and ``{kind}_relative_distance``, without unit; both start at 0.
    A weight that was zero at first, as biases are, has a relative distance of NaN; a weight with a NaN or Inf has NaN for both.
    After a change of shape, dtype or device the measurement starts again.  It keeps a copy of every tensor it takes.

    Look for: growth like the logarithm or the square root of time; a jump is an instability,
    and a layer that stays near 0 while others move does not learn.

    Parameters
    ----------
    kind : str
        The kind to measure.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a module can have several tensors of this kind in a step.

    Examples
    --------
    >>> DistanceFromInitSubscriber().publishes
    ('weights_distance_from_init', 'weights_relative_distance')
    """

    state = ("_first",)

    def __init__(self, kind: str = "weights", **options: Any) -> None:
        require_parameter_kind("DistanceFromInitSubscriber", kind)
        name_results(options, f"{kind}_distance_from_init", f"{kind}_relative_distance")
        super().__init__(kind, **options)
        self._first = TensorCopies()

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the squares of the distance and of the initial norm, which can be summed over the parts of a weight."""
        first = self._first.find(message)
        if first is None:
            self._first.store(message)
            first = message.data
        return torch.stack([squared_distance(message.data, first), squared_norm(first)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit both distances."""
        distance, initial = map(math.sqrt, message.data)
        self.emit(message, distance, self.publishes[0])
        self.emit(message, distance / initial if initial else math.nan, self.publishes[1])
