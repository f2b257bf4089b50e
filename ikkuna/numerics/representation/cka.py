r"""Similarity of two representations of the same inputs: centred kernel alignment.

A representation is a matrix ``(rows, features)``; rows with the same index belong to the same input.
Columns are centred.  Everything is computed in float64, except products of float32 data (:func:`centred_kernels`).
An undefined value is NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import as_float64

__all__ = [
    "centred",
    "centred_kernels",
    "cka_of_hsic",
    "hsic_matrix",
    "linear_cka",
    "to_rows",
]


def to_rows(activations: Tensor, pool: bool = False) -> Tensor:
    """Return activations as ``(rows, features)`` in float64.

    Parameters
    ----------
    activations : Tensor
        ``(batch, feature)``, ``(batch, time, feature)``, ``(batch, channel, height, width)`` or with one more spatial
        axis; ``(batch,)``.
    pool : bool
        Whether outputs are averaged over time or space, so that layers of different size can be compared.
        Otherwise each position is a row; neighbouring positions are similar, so there are fewer independent rows than
        positions.

    Examples
    --------
    >>> to_rows(torch.ones(2, 3, 4, 5)).shape, to_rows(torch.ones(2, 3, 4, 5), pool=True).shape
    (torch.Size([40, 3]), torch.Size([2, 3]))
    """
    x = activations.detach()
    x = as_float64(x.to_dense() if x.layout is not torch.strided else x)
    if x.ndim < 2:
        return x.reshape(-1, 1)
    x = x.movedim(1, -1) if x.ndim > 3 else x
    if pool and x.ndim > 2:
        return x.mean(dim=tuple(range(1, x.ndim - 1)))
    return x.flatten(0, -2)


def centred(x: Tensor) -> Tensor:
    """Return `x` detached, in float64, with the mean of each column subtracted."""
    x = as_float64(x)
    return x - x.mean(0) if x.shape[0] else x


def centred_kernels(representations: Sequence[Tensor]) -> Tensor:
    r"""Return the U-centred linear kernel of each representation; their inner products give :func:`hsic_matrix`.

    With :math:`K = X X^\top`, :math:`\tilde K_{ij} = K_{ij} - \frac{r_i + r_j}{n - 2} + \frac{t}{(n - 1)(n - 2)}`,
    where :math:`r_i` and t are the sums of row i and of all of K without its diagonal; :math:`\tilde K_{ii} = 0`.

    Parameters
    ----------
    representations : sequence of Tensor
        ``(n, d_i)`` each, of the same n inputs.

    Returns
    -------
    Tensor
        ``(layers, n * n)``, float64, in units of :math:`x^2`; NaN for fewer than 4 rows.  Each costs :math:`n^2 d_i`
        operations. On a CPU, products of float32 data are computed in float32, unless they overflow or torch is allowed
        to round further.
        The error of an entry is then about 1e-7 of the lengths of its rows; the error of CKA is smaller.

    Raises
    ------
    ConfigError
        If the representations have different numbers of rows.

    References
    ----------
    G. Székely and M. Rizzo, Partial distance correlation with methods for dissimilarities, 2014.

    Examples
    --------
    >>> centred_kernels([torch.tensor([[1.0], [2.0], [4.0], [5.0]])]).reshape(4, 4)
    tensor([[ 0.0000,  2.8333, -1.1667, -1.6667],
            [ 2.8333,  0.0000, -1.6667, -1.1667],
            [-1.1667, -1.6667,  0.0000,  2.8333],
            [-1.6667, -1.1667,  2.8333,  0.0000]], dtype=torch.float64)
    """
    n = representations[0].shape[0]
    if any(x.shape[0] != n for x in representations):
        raise ConfigError(f"representations need equal numbers of rows, got {[len(x) for x in representations]}")
    if n < 4:
        return as_float64(representations[0]).new_full((len(representations), n * n), torch.nan)
    kernels = _products([x.detach() for x in representations])
    diagonals = kernels.diagonal(dim1=1, dim2=2)
    sums = kernels.sum(2).sub_(diagonals).div_(n - 2)
    shifts = sums.sub_(sums.sum(1, keepdim=True), alpha=0.5 / (n - 1))
    kernels.sub_(shifts.unsqueeze(1)).sub_(shifts.unsqueeze(2))
    diagonals.zero_()
    return kernels.flatten(1)


def _products(representations: list[Tensor]) -> Tensor:
    """Return the products of rows, ``(layers, n, n)``, float64."""
    plain = _takes_float32(representations[0])
    single = [plain and x.dtype is torch.float32 for x in representations]
    products = torch.stack([_product(x if s else as_float64(x)) for x, s in zip(representations, single, strict=True)])
    if products.dtype is torch.float32:
        products = as_float64(products)
    if any(single):
        lengths = products.diagonal(dim1=1, dim2=2).mean(1).tolist()
        for i, length in enumerate(lengths):
            if single[i] and not 1e-18 < length < 1e30:  # squares of smaller numbers underflow
                products[i] = _product(as_float64(representations[i]))
    return products


def _product(x: Tensor) -> Tensor:
    x = x - x[0]  # this makes a constant column exactly 0
    x -= x.mean(0)
    return x @ x.mT


def _takes_float32(x: Tensor) -> bool:
    """Return whether torch computes a float32 product in float32: on a CPU, unless its settings allow bfloat16."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    setting = getattr(matmul, "fp32_precision", None) if x.is_cpu else "unknown"
    return torch.get_float32_matmul_precision() == "highest" if setting is None else setting in ("none", "ieee")


def hsic_matrix(representations: Sequence[Tensor]) -> Tensor:
    r"""Return the unbiased Hilbert-Schmidt independence criterion of every pair of representations, with linear kernels.

    With :math:`\tilde K = X X^\top` without its diagonal, and :math:`\tilde L = Y Y^\top` without its diagonal,

    .. math::
        \mathrm{HSIC}_1 = \frac{1}{n (n - 3)} \left[ \operatorname{tr} \tilde K \tilde L
        + \frac{1^\top \tilde K 1 \; 1^\top \tilde L 1}{(n - 1)(n - 2)} - \frac{2}{n - 2} 1^\top \tilde K \tilde L 1
        \right].

    Parameters
    ----------
    representations : sequence of Tensor
        ``(n, d_i)`` each, of the same n inputs.

    Returns
    -------
    Tensor
        ``(layers, layers)``, float64, symmetric, in units of :math:`x^2 y^2`.  Results can be summed over mini-batches
        before :func:`cka_of_hsic`.  NaN for fewer than 4 rows.

    Notes
    -----
    It costs :math:`n^2 \sum_i d_i` operations and :math:`n^2` doubles for each layer: use mini-batches of several
    hundred rows.

    References
    ----------
    L. Song et al., Feature selection via dependence maximization, 2012.
    T. Nguyen, M. Raghu and S. Kornblith, Do wide and deep networks learn the same things?, 2021 (mini-batches).

    Examples
    --------
    >>> x = torch.arange(12.0).reshape(6, 2)
    >>> hsic_matrix([x, -2 * x]) / hsic_matrix([x])
    tensor([[ 1.,  4.],
            [ 4., 16.]], dtype=torch.float64)
    """
    kernels = centred_kernels(representations)
    n = representations[0].shape[0]
    return kernels @ kernels.mT / (n * (n - 3))


def cka_of_hsic(hsic: Tensor) -> Tensor:
    r"""Return :math:`H_{ij} / \sqrt{H_{ii} H_{jj}}` for a result of :func:`hsic_matrix` or a sum of such results.

    ``(layers, layers)``, dimensionless, at most about 1 and by chance about 0; NaN if a diagonal element is not
    positive.

    Examples
    --------
    >>> cka_of_hsic(torch.tensor([[4.0, 3.0], [3.0, 9.0]]))
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])
    """
    scale = torch.where(hsic.diagonal() > 0, hsic.diagonal(), torch.nan).sqrt()
    return hsic / torch.outer(scale, scale)


def linear_cka(x: Tensor, y: Tensor, debiased: bool = True) -> Tensor:
    r"""Return the linear centred kernel alignment of two representations.

    The biased version is :math:`\|Y^\top X\|_F^2 / (\|X^\top X\|_F \|Y^\top Y\|_F)`.  For n rows of d independent
    features it is far above 0 unless :math:`n \gg d` (0.66 for 256 rows of 512 features).  The debiased version is the
    ratio of :func:`hsic_matrix`.

    Parameters
    ----------
    x, y : Tensor
        ``(n, p)`` and ``(n, q)``, of the same inputs.
    debiased : bool
        Whether the debiased version is computed.

    Returns
    -------
    Tensor
        0-d, float64, dimensionless.  1 for representations that differ by rotation and scale, about 0 for others.
        The debiased version can be slightly outside [0, 1].  NaN if a representation is constant or not finite, or has
        fewer than 2 rows (debiased: 4).

    References
    ----------
    S. Kornblith et al., Similarity of neural network representations revisited, 2019.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> round(linear_cka(x, x[:, :1], debiased=False).item(), 4)
    0.7071
    """
    if debiased:
        return cka_of_hsic(hsic_matrix([x, y]))[0, 1]
    if x.shape[0] != y.shape[0]:
        raise ConfigError(f"representations need equal numbers of rows, got {len(x)} and {len(y)}")
    if x.shape[0] < 2:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    x, y = centred(x), centred(y)
    wide = x.shape[0] < x.shape[1] + y.shape[1]
    if wide:
        gram_x, gram_y = x @ x.mT, y @ y.mT
        cross, own_x, own_y = (gram_x * gram_y).sum(), gram_x.square().sum(), gram_y.square().sum()
    else:
        cross, own_x, own_y = ((a.mT @ b).square().sum() for a, b in ((y, x), (x, x), (y, y)))
    return cross / torch.where((own_x > 0) & (own_y > 0), own_x * own_y, torch.nan).sqrt()
