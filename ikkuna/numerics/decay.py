r"""The part of an update that weight decay makes.

An update is :math:`u = d + r`, with the part *d* of weight decay and the part *r* of the gradients of the loss.
"""

from typing import Any

import torch
from torch import Tensor

from ikkuna.numerics.inner import squared_norm

__all__ = ["adam_decay", "decay_row", "decoupled_decay", "sgd_decay"]


def decoupled_decay(weight: Tensor, rate: Any, decay: Any) -> Tensor:
    r"""Return :math:`d = -\eta \lambda w`, as AdamW computes it.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        The learning rate :math:`\eta` and the weight decay :math:`\lambda`.

    Examples
    --------
    >>> decoupled_decay(torch.tensor([2.0]), rate=0.1, decay=0.5)
    tensor([-0.1000])
    """
    part: Tensor = weight.detach() * (-rate * decay)
    return part


def sgd_decay(
    weight: Tensor, rate: Any, decay: Any, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> Tensor:
    r"""Return :math:`d = -\eta \lambda c\, w` of SGD, whose momentum sums the decay of earlier steps.

    With momentum :math:`\mu` and dampening :math:`\tau`, :math:`c = (1 - \tau) / (1 - \mu)`; with Nesterov's,
    :math:`c = 1 + \mu / (1 - \mu)`; without momentum, :math:`c = 1`.
    This is exact for weights that do not change over the last :math:`1 / (1 - \mu)` steps, and too large in the first of them.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        :math:`\eta` and :math:`\lambda`.
    momentum, dampening : float
        :math:`\mu` and :math:`\tau`.
    nesterov : bool
        Whether the momentum is Nesterov's.

    Examples
    --------
    >>> sgd_decay(torch.tensor([2.0]), rate=0.1, decay=0.5, momentum=0.5)
    tensor([-0.2000])
    """
    if not momentum or momentum >= 1:
        return decoupled_decay(weight, rate, decay)
    factor = 1 + momentum / (1 - momentum) if nesterov else (1 - dampening) / (1 - momentum)
    return decoupled_decay(weight, rate, decay) * factor


def adam_decay(weight: Tensor, rate: Any, decay: Any, exp_avg_sq: Tensor, step: Any, beta2: Any, eps: float) -> Tensor:
    r"""Return the part of weight decay in an update of Adam, which adds :math:`\lambda w` to the gradient.

    It is :math:`d = -\eta \lambda w / (\sqrt{v / (1 - \beta_2^t)} + \epsilon)`.
    This is exact for weights that do not change over the steps that its first moment averages.

    Parameters
    ----------
    weight : Tensor
        :math:`w`, before the step, of any shape.
    rate, decay : float or Tensor
        :math:`\eta` and :math:`\lambda`.
    exp_avg_sq : Tensor
        The second moment :math:`v` after the step, of the same shape.
    step : int or Tensor
        The number of steps *t*.
    beta2 : float or Tensor
        :math:`\beta_2`.
    eps : float
        :math:`\epsilon`.

    Examples
    --------
    >>> adam_decay(torch.tensor([2.0]), 0.1, 0.5, torch.tensor([0.75]), step=1, beta2=0.25, eps=0.0)
    tensor([-0.1000])
    """
    denominator: Tensor = (exp_avg_sq.detach() / (1 - beta2**step)).sqrt() + eps
    return decoupled_decay(weight, rate, decay) / denominator


def decay_row(update: Tensor, decay: Tensor) -> Tensor:
    r"""Return :math:`\lVert d \rVert^2` and :math:`\lVert u - d \rVert^2`, which can be summed over the parts of a tensor.

    Parameters
    ----------
    update, decay : Tensor
        *u* and *d*, of the same shape.

    Returns
    -------
    Tensor
        ``(2,)``, float64.

    Examples
    --------
    >>> decay_row(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])).tolist()
    [16.0, 25.0]
    """
    return torch.stack([squared_norm(decay), squared_norm(update.detach() - decay)])
