"""The ratio of a weight to its update."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.export.messages import ModuleMessage
from ikkuna.numerics.inner import squared_norm
from ikkuna_subscribers._helpers.update_subscriber import UpdateSubscriber

__all__ = ["TrustRatioSubscriber"]


class TrustRatioSubscriber(UpdateSubscriber):
    r"""The norm of a weight over the norm of its update, :math:`\lVert W_t \rVert_2 / \lVert W_t - W_{t-1} \rVert_2`.

    Takes ``weights`` and ``weight_updates``; publishes ``trust_ratio``, without unit, once for each weight.
    The weight is the one after the step.  The ratio is about the reciprocal of the ratio of updates to weights.
    A weight that did not change, or one with a NaN or Inf, has NaN.
    It keeps a copy of each weight during the step.

    Look for: about 1000 in a healthy run, with similar values in all layers; a layer far below the others limits the learning rate of all.

    Parameters
    ----------
    **options : Any
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
        """Return the squares of both norms, which can be summed over the parts of a weight."""
        is_wide = before.dtype.itemsize > 1  # torch has no arithmetic for fp8
        after = before.add_(update) if is_wide else before.float().add_(update.float())
        return torch.stack([squared_norm(after), squared_norm(update)])

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        weight, update = map(math.sqrt, message.data)
        self.emit(message, weight / update if update else math.nan)
