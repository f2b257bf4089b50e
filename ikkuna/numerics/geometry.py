r"""Ratios, angles and distances between tensors, and updates that are lost by rounding.

All are NaN if a divisor is 0, an element is not finite, or two shapes differ; none waits for the device.
"""

import torch
from torch import Tensor

from ikkuna.numerics.elements import CHUNK, readable
from ikkuna.numerics.float64 import widest_float
from ikkuna.numerics.inner import norm, squared_distance

__all__ = ["angle", "cosine", "count_moved", "distance", "effective_update_fraction", "update_ratio"]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > 0, a / b, torch.nan)


def distance(a: Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`\|a - b\|_2`, in the unit of the tensors.

    The distance to the weight at initialisation grows as :math:`\log t` or :math:`\sqrt t`; a jump is an instability.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, at least 0; 0 without elements.

    Examples
    --------
    >>> distance(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0])).item()
    5.0
    """
    return squared_distance(a, b).sqrt()


def update_ratio(before: Tensor, after: Tensor) -> Tensor:
    r"""Return :math:`\|W_t - W_{t-1}\|_2 / \|W_{t-1}\|_2`, dimensionless, at least 0.

    About 1e-3 is healthy; a learning rate is too small below 1e-4 and too large above 1e-2.
    The trust ratio is about its reciprocal; the relative distance from initialisation is its value for :math:`W_0` and
    :math:`W_t`.

    Parameters
    ----------
    before, after : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64.  NaN for a weight that was zero, such as a new bias, or empty.

    Examples
    --------
    >>> round(update_ratio(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.005])).item(), 6)
    0.001
    """
    return _ratio(distance(after, before), norm(before))


def angle(a: Tensor, b: Tensor) -> Tensor:
    r"""Return the angle between two tensors, :math:`2 \operatorname{atan2}(\|\hat a - \hat b\|, \|\hat a + \hat b\|)`.

    Here :math:`\hat a = a / \|a\|`.  The arc cosine gives 0 for an angle of 1e-3 in float32; this formula has an error
    below 1e-6 rad for every angle.  Between successive weights it is the *angular update*, which converges to about
    :math:`\sqrt{2 \eta \lambda}` per step for normalised layers with weight decay.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, in [0, π] rad.  NaN if either is zero or empty.

    Notes
    -----
    Two passes over both tensors.

    References
    ----------
    W. Kahan, How futile are mindless assessments of roundoff in floating-point computation?, 2006.

    Examples
    --------
    >>> round(angle(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])).item(), 6)      # a right angle
    1.570796
    """
    lengths = norm(a), norm(b)
    undefined = (lengths[0] * lengths[1]).mul(0.0)  # 0, or NaN for a length that is not finite
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return undefined * torch.nan
    minus, plus = _squared_sums(a, b, *lengths)
    value = 2 * torch.atan2(minus.sqrt(), plus.sqrt()) + undefined
    return torch.where((lengths[0] > 0) & (lengths[1] > 0), value, torch.nan)


def _squared_sums(a: Tensor, b: Tensor, length_a: Tensor, length_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norms of the difference and the sum of the directions of `a` and `b`."""
    reads = [readable(t.detach().to_dense() if t.layout is not torch.strided else t.detach()) for t in (a, b)]
    x, y = (read[0].reshape(-1) if read else torch.zeros(1, device="cpu") for read in reads)
    size = CHUNK if x.device.type == "cpu" else 1 << 22
    minus, plus = [], []
    for left, right in zip(torch.split(x, size), torch.split(y.to(x.device), size), strict=True):
        u, v = (part.to(widest_float(part)) for part in (left, right))
        u, v = u / length_a, v / length_b
        minus.append((u - v).square().sum())
        plus.append((u + v).square().sum())
    return torch.stack(minus).sum(), torch.stack(plus).sum()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    r"""Return the cosine of the :func:`angle` between two tensors.

    For successive updates it is near the momentum, for successive gradients near 0; towards -1 training oscillates.

    Parameters
    ----------
    a, b : Tensor
        Of the same shape, of any dtype and layout.

    Returns
    -------
    Tensor
        0-d, float64, in [-1, 1].  NaN if either is zero or empty.

    Examples
    --------
    >>> round(cosine(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])).item(), 4)
    0.7071
    """
    return angle(a, b).cos()


def count_moved(weight: Tensor, update: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    r"""Count the weights that an update changes after the sum is rounded to `dtype`.

    Parameters
    ----------
    weight, update : Tensor
        Of the same shape.  `weight` is rounded to `dtype` first.
    dtype : torch.dtype
        The dtype of the stored weight.

    Returns
    -------
    Tensor
        ``(2,)``, int64: changed elements, and elements whose update is not 0 (a NaN update is not 0 and changes its
        element).
        Results can be summed.

    Examples
    --------
    >>> count_moved(torch.ones(2), torch.tensor([1e-3, 1e-2])).tolist()      # in bfloat16, 1 is followed by 1.0078
    [1, 2]
    """
    dense = [t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (weight, update)]
    reads = [readable(t) for t in dense]
    if reads[0] is None or reads[1] is None or weight.shape != update.shape:
        return torch.zeros(2, dtype=torch.int64, device="cpu")
    w, u = reads[0][0].to(dtype), reads[1][0]
    after = (w.double() + u).to(dtype)
    asked = u != 0
    return torch.stack([torch.count_nonzero((after != w) & asked), torch.count_nonzero(asked)])


def effective_update_fraction(weight: Tensor, update: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    r"""Return the share of nonzero updates that change a weight stored in `dtype`; the others are lost.

    Bfloat16 has steps of 1/128 to 1/256 of a number, so at the usual update ratio of 1e-3 four of five weights do not
    change.

    Parameters
    ----------
    weight, update : Tensor
        Of the same shape.
    dtype : torch.dtype
        The dtype of the stored weight.

    Returns
    -------
    Tensor
        0-d, float64, in [0, 1]; NaN without a nonzero update.

    Examples
    --------
    >>> effective_update_fraction(torch.ones(2), torch.tensor([1e-3, 1e-2])).item()
    0.5
    """
    moved, asked = count_moved(weight, update, dtype).double()
    return _ratio(moved, asked)
