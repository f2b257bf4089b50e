"""The share of weights that an update changes."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigTypeError
from ikkuna.export.messages import ModuleMessage
from ikkuna.numerics.geometry import count_moved
from ikkuna_subscribers._helpers.update_subscriber import UpdateSubscriber

__all__ = ["EffectiveUpdateSubscriber"]


class EffectiveUpdateSubscriber(UpdateSubscriber):
    r"""The share of weights that a step changes after rounding to their dtype, :math:`\#\{i : w_i + u_i \ne w_i\} / n`.

    Without `dtype` it is the share of all elements of a weight that differ from their value before the step.
    With `dtype` it is the share of nonzero updates, :math:`u_i \ne 0`, that would change a weight stored in this dtype.

    Takes ``weights`` and ``weight_updates``; publishes ``effective_update_fraction``, between 0 and 1, once for each weight.
    It is NaN if no update is wanted.  It keeps a copy of each weight during the step.

    Look for: values near 1 in float32.  Bfloat16 has steps of 1/128 to 1/256 of a number, so a usual update of 1/1000 of a weight
    leaves four of five weights unchanged: keep the weights in float32, or use stochastic rounding.

    Parameters
    ----------
    dtype : torch.dtype, optional
        The dtype in which weights are assumed to be stored.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `dtype` is not a floating dtype.

    Examples
    --------
    >>> EffectiveUpdateSubscriber(torch.bfloat16).publishes
    ('effective_update_fraction',)
    """

    def __init__(self, dtype: torch.dtype | None = None, **options: Any) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigTypeError(f"EffectiveUpdateSubscriber needs a floating torch.dtype, got {dtype!r}")
        options.setdefault("publishes", "effective_update_fraction")
        super().__init__(**options)
        self.dtype = dtype

    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the numbers of changed weights and of weights with a nonzero update."""
        if self.dtype is not None:
            return count_moved(before, update, self.dtype)
        moved = torch.count_nonzero(update)
        return torch.stack([moved, torch.full_like(moved, update.numel())])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        moved, wanted = message.data
        self.emit(message, moved / wanted if wanted else math.nan)
