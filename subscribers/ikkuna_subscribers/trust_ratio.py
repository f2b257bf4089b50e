"""How large a weight is beside its update."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.numerics.inner import squared_norm
from ikkuna_subscribers._helpers.update import UpdateSubscriber

__all__ = ["TrustRatioSubscriber"]


class TrustRatioSubscriber(UpdateSubscriber):
    r"""The norm of a weight after a step over that of the step, :math:`\lVert W_t \rVert_2 / \lVert W_t - W_{t-1} \rVert_2`.

    Takes ``weights`` and ``weight_updates``; publishes ``trust_ratio``, without unit, once for each weight.
    It is about the reciprocal of the ratio of updates to weights.  A weight that did not move, or one with a NaN or Inf, has NaN.
    It keeps a copy of each weight during the step.

    Look for: about 1000 in a healthy run, and alike in all layers; a layer far below the others limits the learning rate of all.

    Parameters
    ----------
    **options
        See `Subscriber`.

    References
    ----------
    Y. You, I. Gitman and B. Ginsburg, Large batch training of convolutional networks, 2017.

    Examples
    --------
    >>> TrustRatioSubscriber().publishes
    ('trust_ratio',)
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "trust_ratio")
        super().__init__(**options)

    def measure_update(self, before: Tensor, update: Tensor) -> Tensor:
        """Return the squares of both norms, which add over the parts of a weight."""
        is_wide = before.dtype.itemsize > 1  # there is no arithmetic for fp8
        after = before.add_(update) if is_wide else before.float().add_(update.float())
        return torch.stack([squared_norm(after), squared_norm(update)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        weight, update = map(math.sqrt, message.data)
        self.emit(message, weight / update if update else math.nan)
