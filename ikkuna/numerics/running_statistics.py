r"""The distance between running statistics and those of a batch."""

import torch
from torch import Tensor

__all__ = ["running_statistics_distance"]

_MAX_POSITIONS = 4096


def running_statistics_distance(
    x: Tensor, running_mean: Tensor, running_variance: Tensor, epsilon: float = 1e-5
) -> Tensor:
    r"""Return the squared distances of mean and variance, averaged over channels.

    With mean :math:`\mu_c` and variance :math:`v_c` of channel c in the batch, and :math:`m_c` and :math:`r_c` running,
    they are :math:`\overline{(\mu_c - m_c)^2 / (r_c + \epsilon)}` and :math:`\overline{\ln^2 \frac{v_c + \epsilon}{r_c + \epsilon}}`.

    Parameters
    ----------
    x : Tensor
        ``(batch, channels, ...)``; of more than 4,096 positions of a channel an equally spaced sample of at least 1,024 is read.
    running_mean, running_variance : Tensor
        ``(channels,)``
    epsilon : float
        Added to each variance.

    Returns
    -------
    Tensor
        ``(2,)``, without unit, float32 or the dtype of `running_mean` if that is wider; NaN if there is one in `x`.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0]])
    >>> running_statistics_distance(x, torch.tensor([3.0]), torch.tensor([1.0]), epsilon=0.0)
    tensor([4., 0.])
    """
    dtype = torch.promote_types(running_mean.dtype, torch.float32)
    flat = x.reshape(len(x), x.shape[1], -1)
    positions = flat.shape[2]
    stride = max(positions * len(x) // _MAX_POSITIONS, 1)
    stride = min(stride, positions)
    variance, mean = torch.var_mean(flat[:, :, ::stride].to(dtype), dim=(0, 2), correction=0)
    m, r = running_mean.to(dtype), running_variance.to(dtype) + epsilon
    of_mean = (mean - m).square() / r
    of_variance = ((variance + epsilon) / r).log().square()
    return torch.stack([of_mean.mean(), of_variance.mean()])
