"""The factor by which a gradient scaler multiplies the loss."""

import weakref

import torch
from torch import Tensor

from ikkuna.distributed.dtensor import divided

__all__ = ["LossScale"]


class LossScale:
    """Removes the factor of the gradient scaler that has called the last optimizer.

    A backward does not show which scaler has scaled its loss; the next step of an optimizer does.

    Attributes
    ----------
    is_used : bool
        Whether a gradient scaler has called the last optimizer.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None

    def set_scaler(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Set the scaler that calls the running optimizer; return whether it is another one than at the step before."""
        known = self._scaler() if self._scaler is not None else None
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.is_used = scaler is not None
        return scaler is not known

    @property
    def factor(self) -> Tensor | None:
        """The factor of the scaler, a tensor that it changes in place; ``None`` without a scaler."""
        scaler = self._scaler() if self._scaler is not None else None
        return None if scaler is None else scaler._scale

    def removed_from(self, grad: Tensor) -> Tensor:
        """Return a gradient without the factor, in at least float32."""
        scale = self.factor
        return grad if scale is None else divided(grad, scale.to(grad.device, non_blocking=True))
