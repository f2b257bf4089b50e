"""How many weights an update really moves."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigTypeError
from ikkuna.export.messages import ModuleMessage
from ikkuna.numerics.geometry import count_moved
from ikkuna_subscribers._helpers.update import UpdateSubscriber

__all__ = ["EffectiveUpdateSubscriber"]


class EffectiveUpdateSubscriber(UpdateSubscriber):
    r"""The share of weights that a step moves, :math:`\#\{i : w_i + u_i \ne w_i\} / n`, after rounding to what they are stored in.

    Without `dtype` it is the share of all weights of a tensor that are not what they were: what really happened.
    With one it is what would have happened, were the weights stored in it: the share of wanted updates, :math:`u_i \ne 0`, that survive.

    Takes ``weights`` and ``weight_updates``; publishes ``effective_update_fraction``, between 0 and 1, once for each weight.
    It is NaN where no update is wanted.  It keeps a copy of each weight during the step.

    Look for: near 1 in float32.  In bfloat16, which steps by 1/128 to 1/256 of a number, the usual update of a thousandth of a weight
    leaves four of five where they are: keep the weights in float32, or round at random.

    Parameters
    ----------
    dtype : torch.dtype, optional
        What the weights are imagined to be stored in.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigTypeError
        If `dtype` is no floating dtype.

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
        """Return the numbers of moved weights and of those that should move."""
        if self.dtype is not None:
            return count_moved(before, update, self.dtype)
        moved = torch.count_nonzero(update)
        return torch.stack([moved, torch.full_like(moved, update.numel())])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        moved, wanted = message.data
        self.emit(message, moved / wanted if wanted else math.nan)
