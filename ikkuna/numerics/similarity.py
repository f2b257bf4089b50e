r"""How alike two layers represent the same inputs: centred kernel alignment.

A representation is a matrix ``(rows, features)``; equal rows of two of them belong to the same input.
Columns are centred, everything is computed in float64 but for products of what comes in float32 (:func:`gram_matrix`),
and a value that does not exist is NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ikkuna.errors import ConfigError

__all__ = [
    "centred",
    "cka_of_hsic",
    "gram_matrix",
    "hsic_matrix",
    "hsic_of_grams",
    "hsic_of_pairs",
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
        Average over time or space, so that layers of different size compare.
        Otherwise every position is a row: as neighbours are alike, there are fewer independent rows than it seems.

    Examples
    --------
    >>> to_rows(torch.ones(2, 3, 4, 5)).shape, to_rows(torch.ones(2, 3, 4, 5), pool=True).shape
    (torch.Size([40, 3]), torch.Size([2, 3]))
    """
    x = activations.detach()
    x = (x.to_dense() if x.layout is not torch.strided else x).double()
    if x.ndim < 2:
        return x.reshape(-1, 1)
    x = x.movedim(1, -1) if x.ndim > 3 else x
    if pool and x.ndim > 2:
        return x.mean(dim=tuple(range(1, x.ndim - 1)))
    return x.flatten(0, -2)


def centred(x: Tensor) -> Tensor:
    """Return `x` detached, in float64, with the mean of each column subtracted."""
    x = x.detach().double()
    return x - x.mean(0) if x.shape[0] else x


def gram_matrix(x: Tensor) -> Tensor:
    r"""Return :math:`X X^\top` of the centred `x`, with a diagonal of zeros: what :func:`hsic_of_grams` compares.

    Parameters
    ----------
    x : Tensor
        ``(n, d)``.

    Returns
    -------
    Tensor
        ``(n, n)``, float64, symmetric, in units of :math:`x^2`; :math:`n^2 d` operations.
        Those of float32 are made in float32 on a CPU, unless it overflows or torch may round further:
        an entry is then off by about 1e-7 of its rows' lengths, and CKA by less.

    Examples
    --------
    >>> gram_matrix(torch.tensor([[1.0], [3.0], [5.0]]))
    tensor([[ 0., -0., -4.],
            [-0.,  0.,  0.],
            [-4.,  0.,  0.]], dtype=torch.float64)
    """
    x = x.detach()
    gram = _product(x) if _fits_float32(x) else None
    if gram is None or not 1e-18 < gram.diagonal().mean().item() < 1e30:  # squares of smaller numbers begin to be lost
        gram = _product(x.double())
    return gram.double().fill_diagonal_(0.0)


def _product(x: Tensor) -> Tensor:
    x = x - x.mean(0, dtype=torch.float64).to(x.dtype) if len(x) else x  # a constant column is 0 afterwards, exactly
    return x @ x.mT


def _fits_float32(x: Tensor) -> bool:
    """Say whether a product in float32 is taken as such, by the settings of torch: on a CPU and not in bfloat16."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    setting = getattr(matmul, "fp32_precision", None) if x.is_cpu else "unknown"
    plain = torch.get_float32_matmul_precision() == "highest" if setting is None else setting in ("none", "ieee")
    return x.dtype is torch.float32 and plain


def hsic_matrix(representations: Sequence[Tensor]) -> Tensor:
    r"""Return the unbiased Hilbert-Schmidt independence of every pair of representations, with linear kernels.

    With :math:`\tilde K = X X^\top` without its diagonal, and :math:`\tilde L` likewise,

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
        ``(layers, layers)``, float64, symmetric, in units of :math:`x^2 y^2`.  Means or sums over mini-batches
        estimate the same:
        add them up, and give the sum to :func:`cka_of_hsic`.  NaN for fewer than 4 rows.

    Notes
    -----
    :math:`n^2 \sum_i d_i` operations and :math:`n^2` doubles for each layer: take mini-batches of some hundred rows.

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
    n = representations[0].shape[0]
    if any(x.shape[0] != n for x in representations):
        raise ConfigError(f"representations need the same rows, got {[len(x) for x in representations]} of them")
    return hsic_of_grams(torch.stack([gram_matrix(x) for x in representations]))


def hsic_of_grams(grams: Tensor) -> Tensor:
    r"""Return what :func:`hsic_matrix` does, for results of :func:`gram_matrix`, ``(layers, n, n)``.

    Examples
    --------
    >>> x = torch.arange(12.0).reshape(6, 2)
    >>> torch.equal(hsic_of_grams(torch.stack([gram_matrix(x)])), hsic_matrix([x]))
    True
    """
    n, sums, flat = grams.shape[-1], grams.sum(2), grams.flatten(1)
    totals = sums.sum(1)
    return _unbiased(n, flat @ flat.mT, torch.outer(totals, totals), sums @ sums.mT)


def hsic_of_pairs(grams: Tensor, others: Tensor) -> Tensor:
    r"""Return the independence of each layer and its other, ``(layers,)``, of the same n inputs.

    Both are results of :func:`gram_matrix`, ``(layers, n, n)``, which may have been kept from before.

    Examples
    --------
    >>> x = torch.arange(12.0).reshape(6, 2)
    >>> grams = torch.stack([gram_matrix(x), gram_matrix(x.sin())])
    >>> torch.allclose(hsic_of_pairs(grams, grams.flip(0)), hsic_of_grams(grams)[0, 1])
    True
    """
    n, sums, other_sums = grams.shape[-1], grams.sum(2), others.sum(2)
    traces = torch.linalg.vecdot(grams.flatten(1), others.flatten(1))
    return _unbiased(n, traces, sums.sum(1) * other_sums.sum(1), torch.linalg.vecdot(sums, other_sums))


def _unbiased(n: int, traces: Tensor, totals: Tensor, products: Tensor) -> Tensor:
    if n < 4:
        return torch.full_like(traces, torch.nan)
    return (traces + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * products) / (n * (n - 3))


def cka_of_hsic(hsic: Tensor) -> Tensor:
    r"""Return :math:`H_{ij} / \sqrt{H_{ii} H_{jj}}` for a result of :func:`hsic_matrix`, or a sum of such.

    ``(layers, layers)``, dimensionless, at most about 1 and by chance about 0; NaN where a self-similarity is not
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

    Biased it is :math:`\|Y^\top X\|_F^2 / (\|X^\top X\|_F \|Y^\top Y\|_F)`, which for n rows of d independent
    features reads far above
    0 unless :math:`n \gg d` (0.66 for 256 rows of 512 features); debiased it is the ratio of :func:`hsic_matrix`.

    Parameters
    ----------
    x, y : Tensor
        ``(n, p)`` and ``(n, q)``, of the same inputs.
    debiased : bool

    Returns
    -------
    Tensor
        0-d, float64, dimensionless.  1 for representations that differ by rotation and scale, about 0 for unrelated
        ones; debiased,
        chance can bring it slightly beyond [0, 1].  NaN if a representation is constant or not finite, or for too few
        rows (2, or 4).

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
        raise ConfigError(f"representations need the same rows, got {len(x)} and {len(y)} of them")
    if x.shape[0] < 2:
        return torch.tensor(torch.nan, dtype=torch.float64)
    x, y = centred(x), centred(y)
    wide = x.shape[0] < x.shape[1] + y.shape[1]
    if wide:
        gram_x, gram_y = x @ x.mT, y @ y.mT
        cross, own_x, own_y = (gram_x * gram_y).sum(), gram_x.square().sum(), gram_y.square().sum()
    else:
        cross, own_x, own_y = ((a.mT @ b).square().sum() for a, b in ((y, x), (x, x), (y, y)))
    return cross / torch.where((own_x > 0) & (own_y > 0), own_x * own_y, torch.nan).sqrt()
