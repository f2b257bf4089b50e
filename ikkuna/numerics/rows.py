"""Statistics of the rows of a tensor, averaged over rows."""

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import CHUNK

__all__ = ["ROW_STATISTICS", "row_means", "row_sums"]

ROW_STATISTICS = ("l2_norm", "mean", "max", "skewness", "kurtosis")
"""The statistics of a row, in the order of the results."""


def row_sums(x: Tensor) -> Tensor:
    r"""Sum statistics of the rows of `x`, its vectors along the last axis, without waiting for the device.

    With the mean :math:`\mu` of a row of *d* elements and :math:`m_k = \frac 1 d \sum_i (x_i - \mu)^k`, they are
    :math:`\lVert x \rVert_2`, :math:`\mu`, :math:`\max_i x_i`, the skewness :math:`m_3 / m_2^{3/2}`
    and the kurtosis :math:`m_4 / m_2^2`, which is 3 for a normal distribution.

    Parameters
    ----------
    x : Tensor
        ``(…, d)``, real.

    Returns
    -------
    Tensor
        ``(2, 5)``, float64: the sums in the order of :data:`ROW_STATISTICS`, and the number of rows in each.
        Rows whose elements are equal have no skewness and no kurtosis; rows of no element are left out.
        Results can be summed; see :func:`row_means`.  A NaN or Inf makes the sums NaN.

    Raises
    ------
    ConfigError
        If `x` has no axis.

    Examples
    --------
    >>> sums, rows = row_sums(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    >>> sums[:3].tolist(), rows.tolist()
    ([5.0, 3.5, 4.0], [2.0, 2.0, 2.0, 1.0, 1.0])
    """
    if not x.ndim:
        raise ConfigError("row_sums needs a tensor with an axis, got a number")
    total = torch.zeros(2, len(ROW_STATISTICS), dtype=torch.float64, device=x.device)
    if not x.numel():
        return total
    rows = x.detach().reshape(-1, x.shape[-1])
    # parts that stay in the cache also bound the size of the copies
    parts = rows.split(max(1, CHUNK // rows.shape[1])) if rows.device.type == "cpu" else (rows,)
    for part in parts:
        total += _sums(part if part.dtype is torch.float64 else part.float())
    return total


def _sums(rows: Tensor) -> Tensor:
    low, high = torch.aminmax(rows, dim=1)
    mean = rows.mean(1, dtype=torch.float64)
    centred = rows - mean[:, None].to(rows)
    centred = centred - centred.mean(
        1, keepdim=True
    )  # the first mean was rounded, by much if it is far above the spread
    # a power of two scales each row exactly, so that no fourth power overflows or vanishes
    spread = torch.linalg.vector_norm(centred, torch.inf, dim=1, keepdim=True)
    scaled = centred / torch.ldexp(torch.ones_like(spread), torch.frexp(spread).exponent)
    squares = scaled * scaled
    m2, m3, m4 = (v.mean(1, dtype=torch.float64) for v in (squares, squares * scaled, squares * squares))
    varies = low != high
    # torch would sum in float32 otherwise, which is wrong by up to a percent for long rows
    norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    undefined = torch.where(low.isfinite() & high.isfinite(), 0.0, torch.nan)
    shape = [torch.where(varies, value, 0.0) for value in (m3 / m2**1.5, m4 / m2**2)]
    values = [norm, mean, high.double(), *shape]
    numbers = [torch.ones_like(mean)] * 3 + [varies.double()] * 2
    return torch.stack([torch.stack([(v + undefined).sum() for v in values]), torch.stack([n.sum() for n in numbers])])


def row_means(sums: Tensor) -> Tensor:
    """Return the statistics averaged over rows, ``(5,)``, from a result of :func:`row_sums` or a sum of such results.

    The value is NaN if no row has the statistic.

    Examples
    --------
    >>> row_means(row_sums(torch.tensor([[3.0, 4.0, 5.0], [1.0, 1.0, 4.0]]))).round(decimals=3).tolist()
    [5.657, 3.0, 4.5, 0.354, 1.5]
    """
    return sums[0] / torch.where(sums[1] > 0, sums[1], torch.nan)
