"""The number of directions in which the rows of a layer's output differ."""

import math

import torch
from torch import Tensor

from ikkuna.numerics.elements import readable

__all__ = ["dimension"]


def dimension(activations: Tensor, rows: int = 128) -> Tensor:
    r"""Return the participation ratio of the covariance of a layer's units.

    .. math:: D = \frac{(\operatorname{tr} G)^2}{\lVert G \rVert_F^2}

    with the matrix :math:`G` of the inner products of centred rows.
    It is the number of eigenvalues of the covariance if these are equal, and 1 if all rows lie on a line.
    No decomposition is needed; the cost is that of ``rows * rows * unit`` multiplications.

    Parameters
    ----------
    activations : Tensor
        ``(batch, unit)``, ``(batch, time, unit)``, or ``(batch, unit, height, width)`` and other layouts of at least four axes.
        Each position is a row.
    rows : int
        The number of rows that are read; of more, equally spaced ones.

    Returns
    -------
    Tensor
        0-d, float64, between 1 and the smaller of ``rows - 1`` and the number of units.
        NaN for fewer than four rows, for rows that are all equal, with a NaN or Inf, and for a tensor without numbers.

    References
    ----------
    P. Gao and S. Ganguli, On simplicity and complexity in the brave new world of large-scale neuroscience, 2015.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> dimension(x)
    tensor(2., dtype=torch.float64)
    >>> dimension(x * torch.tensor([1.0, 0.0]))
    tensor(1., dtype=torch.float64)
    """
    unknown = torch.full((), math.nan, dtype=torch.float64, device=activations.device)
    dense = activations.detach().to_dense() if activations.layout is not torch.strided else activations.detach()
    read = readable(dense)
    if read is None or dense.ndim < 2 or not dense.numel() or dense.is_complex():
        return unknown
    chosen = _rows(read[0], rows)
    chosen = chosen if chosen.dtype is torch.float64 else chosen.float()
    if len(chosen) < 4:
        return unknown
    centred = chosen - chosen.mean(0)
    centred = centred / centred.abs().amax().clamp(min=torch.finfo(centred.dtype).tiny)  # no square overflows
    products = centred @ centred.mT if len(centred) <= centred.shape[1] else centred.mT @ centred
    return (products.diagonal().sum().square() / products.square().sum()).double()


def _rows(x: Tensor, number: int) -> Tensor:
    """Return at most `number` equally spaced rows, (row, unit)."""
    if x.ndim <= 3:
        by_row = x.reshape(-1, x.shape[-1])
        return by_row[:: math.ceil(len(by_row) / number)]
    positions = math.prod(x.shape[2:])
    total = x.shape[0] * positions
    index = torch.arange(0, total, math.ceil(total / number), device=x.device)
    return x.flatten(2)[index // positions, :, index % positions]
