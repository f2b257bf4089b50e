"""Comparisons of the representations that layers learn.

A representation is a matrix ``(rows, features)``; rows with the same index belong to the same input.
Of complex outputs, real and imaginary parts are two features.
Columns are centred.  Everything is computed in float64, except products of float32 data (:func:`centred_kernels`).
What is computed from orthonormal bases waits for the device.  An undefined value is NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import as_float64, as_reals, dense, readable


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
    x = dense(activations)
    x = x.reshape(-1, 1) if x.ndim < 2 else x.movedim(1, -1) if x.ndim > 3 else x
    x = as_float64(as_reals(x).flatten(x.ndim - 1))
    if pool and x.ndim > 2:
        return x.mean(dim=tuple(range(1, x.ndim - 1)))
    return x.flatten(0, -2)


def centred(x: Tensor) -> Tensor:
    """Return ``(rows, features)`` detached, in float64, with the mean of each column subtracted."""
    x = as_float64(as_reals(x).flatten(1))
    x = x - x[:1].sum(0)  # this makes a constant column exactly 0
    return x - x.mean(0) if x.shape[0] else x


def centred_kernels(representations: Sequence[Tensor]) -> Tensor:
    r"""Return the U-centred linear kernel of each representation.

    With :math:`K = X X^\top`, :math:`\tilde K_{ij} = K_{ij} - \frac{r_i + r_j}{n - 2} + \frac{t}{(n - 1)(n - 2)}`,
    where :math:`r_i` and t are the sums of row i and of all of K without its diagonal; :math:`\tilde K_{ii} = 0`.
    The inner product of two of them over :math:`n (n - 3)` is the unbiased Hilbert-Schmidt independence criterion of both,
    which can be summed over mini-batches of several hundred rows before :func:`cka_of_hsic`.

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
    L. Song et al., Feature selection via dependence maximization, 2012.
    T. Nguyen, M. Raghu and S. Kornblith, Do wide and deep networks learn the same things?, 2021 (mini-batches).

    Examples
    --------
    >>> centred_kernels([torch.tensor([[1.0], [2.0], [4.0], [5.0]])]).reshape(4, 4)
    tensor([[ 0.0000,  2.8333, -1.1667, -1.6667],
            [ 2.8333,  0.0000, -1.6667, -1.1667],
            [-1.1667, -1.6667,  0.0000,  2.8333],
            [-1.6667, -1.1667,  2.8333,  0.0000]], dtype=torch.float64)
    """
    n = representations[0].shape[0]
    _check_rows(*representations)
    if n < 4:
        return as_float64(representations[0]).new_full((len(representations), n * n), torch.nan)
    kernels = _products([as_reals(x.detach()).flatten(1) for x in representations])
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


def cka_of_hsic(hsic: Tensor) -> Tensor:
    r"""Return :math:`H_{ij} / \sqrt{H_{ii} H_{jj}}` of the inner products of :func:`centred_kernels`.

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


def _check_rows(*representations: Tensor) -> None:
    if len(numbers := {len(x) for x in representations}) > 1:
        raise ConfigError(f"representations need equal numbers of rows, got {' and '.join(map(str, sorted(numbers)))}")


def principal_basis(x: Tensor, variance: float = 0.99) -> Tensor:
    r"""Return an orthonormal basis of the fewest principal directions of `x` that hold a share `variance` of its variance.

    Parameters
    ----------
    x : Tensor
        ``(n, p)``; columns are centred.
    variance : float
        The share of the variance to keep, in (0, 1].

    Returns
    -------
    Tensor
        ``(n, directions)``, float64, without unit; zero directions if `x` is constant or not finite.

    Notes
    -----
    About :math:`6 n p^2` operations.

    Examples
    --------
    >>> principal_basis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.01], [0.0, -0.01]])).shape
    torch.Size([4, 1])
    """
    if not 0 < variance <= 1:
        raise ConfigError(f"svcca needs a variance in (0, 1], got {variance!r}")
    x = centred(x)
    none: Tensor = x.new_zeros(x.shape[0], 0)
    if not x.numel() or not x.isfinite().all():
        return none
    rows: Tensor
    rows, values, _ = torch.linalg.svd(x, full_matrices=False)
    rank = int((values > values[0] * max(x.shape) * torch.finfo(x.dtype).eps).sum())  # without rounding errors
    if not rank or not values[0] > 0:
        return none
    if variance < 1:
        shares = values[:rank].square().cumsum(0)
        rank = min(rank, int((shares < variance * shares[-1]).sum()) + 1)
    return rows[:, :rank]


def svcca(left: Tensor, right: Tensor) -> float:
    r"""Return the mean canonical correlation of two results of :func:`principal_basis`.

    The canonical correlations are the singular values of the product of the bases, so that no covariance is inverted.

    Parameters
    ----------
    left, right : Tensor
        ``(n, directions)``, of the same inputs.  Use at least ten rows for each feature: independent data with
        ``n = 2 p`` have a mean correlation of 0.64, and all correlations are 1 with fewer rows than features.

    Returns
    -------
    float
        In [0, 1], over the smaller number of directions; NaN without directions.  Compare it with :func:`chance_level`.

    References
    ----------
    M. Raghu et al., SVCCA: singular vector canonical correlation analysis for deep learning dynamics, 2017.

    Examples
    --------
    >>> basis = principal_basis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
    >>> round(svcca(basis, basis), 6)
    1.0
    """
    _check_rows(left, right)
    if not left.shape[1] or not right.shape[1]:
        return math.nan
    return float(torch.linalg.svdvals(left.mT @ right).clamp(max=1.0).mean().item())


def chance_level(p: int, q: int, n: int) -> float:
    r"""Return the mean canonical correlation that `n` rows of `p` and `q` independent features show by chance.

    The mean of :math:`\rho^2` is :math:`\max(p, q) / (n - 1)`.  With :math:`a = \min(p, q) / (n - 1)` and
    :math:`b = \max(p, q) / (n - 1)`, :math:`\lambda = \rho^2` follows, for large n, the law of Wachter (1980) on
    :math:`\lambda_\pm = (\sqrt{a (1 - b)} \pm \sqrt{b (1 - a)})^2`, with the density
    :math:`\sqrt{(\lambda_+ - \lambda)(\lambda - \lambda_-)} / 2 \pi a \lambda (1 - \lambda)`.

    Parameters
    ----------
    p, q : int
        The numbers of directions.
    n : int
        The number of rows.

    Returns
    -------
    float
        In [0, 1]; 1 if :math:`n - 1 \le \max(p, q)`, and NaN without directions.

    Examples
    --------
    >>> round(chance_level(500, 500, 10_000), 4)
    0.1908
    """
    if min(p, q) < 1 or n < 2:
        return math.nan
    a, b = min(p, q) / (n - 1), max(p, q) / (n - 1)
    if b >= 1:
        return 1.0
    low, high = ((math.sqrt(a * (1 - b)) + s * math.sqrt(b * (1 - a))) ** 2 for s in (-1, 1))
    certain = max(0.0, (a + b - 1) / a)  # this share of the correlations is exactly 1
    angle = (torch.arange(20_000, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / 20_000)
    half, value = (high - low) / 2, (high + low) / 2 + (high - low) / 2 * angle.cos()
    density = (half * angle.sin()) ** 2 / (value * (1 - value))
    mean = (density * value.sqrt()).sum() / density.sum()
    return float(certain + (1 - certain) * mean.item())


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
    x = dense(activations)
    read = readable(x)
    if read is None or x.ndim < 2 or not x.numel() or x.is_complex():
        return unknown
    chosen = _rows(read[0], rows)
    chosen = chosen if chosen.dtype is torch.float64 else chosen.float()
    if len(chosen) < 4:
        return unknown
    centred = chosen - chosen[0]  # this makes a constant column exactly 0
    centred = centred - centred.mean(0)
    centred = centred / centred.abs().amax().clamp(min=torch.finfo(centred.dtype).tiny)  # no square overflows
    products = centred @ centred.mT if len(centred) <= centred.shape[1] else centred.mT @ centred
    return (products.diagonal().sum().square() / products.square().sum()).double()


def _rows(x: Tensor, number: int) -> Tensor:
    """Return at most `number` equally spaced rows, (row, unit).

    Their distance has no factor in common with the number of positions of a sample, so that they are of all positions.
    """
    positions = math.prod(x.shape[1:-1] if x.ndim <= 3 else x.shape[2:])
    total = len(x) * positions
    distance = max(math.ceil(total / number), 1)
    while math.gcd(distance, positions) > 1:
        distance += 1
    if x.ndim <= 3:
        return x.reshape(-1, x.shape[-1])[::distance]
    index = torch.arange(0, total, distance, device=x.device)
    return x.flatten(2)[index // positions, :, index % positions]


@dataclass(frozen=True, eq=False)
class Scatter:
    r"""Number of rows, mean, and :math:`M_2 = \sum (x - \bar x)(x - \bar x)^\top`, which merge to a covariance.

    Parameters
    ----------
    n : int
        The number of rows.
    mean : Tensor
        ``(features,)``, float64.
    m2 : Tensor
        ``(features, features)``, float64.

    Examples
    --------
    >>> x = torch.tensor([[0.0], [2.0], [4.0]])
    >>> (Scatter.of(x[:2]) + Scatter.of(x[2:])).covariance().item() == Scatter.of(x).covariance().item() == 8 / 3
    True
    """

    n: int
    mean: Tensor
    m2: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Scatter":
        """Return the scatter of ``(rows, features)``, which costs :math:`2 n d^2` operations and two float64 copies."""
        deviations = centred(rows)
        mean = (as_float64(as_reals(rows[:1]).flatten(1)) - deviations[:1]).sum(0)
        return cls(len(rows), mean, deviations.mT @ deviations)

    def __add__(self, other: "Scatter") -> "Scatter":
        """Return the scatter of both sets of rows (Chan, Golub and LeVeque 1979)."""
        if not self.n or not other.n:
            return self if self.n else other
        n, d = self.n + other.n, other.mean - self.mean
        m2 = self.m2 + other.m2 + torch.outer(d, d) * (self.n * other.n / n)
        return Scatter(n, self.mean + d * (other.n / n), m2)

    def covariance(self) -> Tensor:
        """Return the population covariance ``(features, features)``; NaN without rows."""
        return self.m2 / self.n if self.n else torch.full_like(self.m2, torch.nan)


def intrinsic_dimension(covariance: Tensor, threshold: float = 0.99, compat: str | None = None) -> float:
    r"""Return the smallest k for which the k largest eigenvalues hold a share `threshold` of the variance.

    Parameters
    ----------
    covariance : Tensor
        ``(features, features)``, symmetric.
    threshold : float
        In (0, 1].
    compat : {None, 'delve'}
        By default the definition.  ``'delve'`` counts as that library does: the eigenvalues whose cumulative share is
        below the threshold, which is usually one less and can be 0.

    Returns
    -------
    float
        Between 1 (``'delve'``: 0) and the rank, which is at most the number of rows minus one.
        NaN without variance, without features, and if an element is not finite.

    References
    ----------
    M. Richter et al., Feature space saturation during training, 2021.

    Examples
    --------
    >>> intrinsic_dimension(torch.diag(torch.tensor([98.0, 1.5, 0.5])))
    2.0
    >>> intrinsic_dimension(torch.diag(torch.tensor([98.0, 1.5, 0.5])), compat="delve")
    1.0
    """
    if compat not in (None, "delve") or not 0 < threshold <= 1:
        raise ConfigError(
            f"intrinsic_dimension needs a threshold in (0, 1] and compat None or 'delve', got {threshold!r}, {compat!r}"
        )
    c = as_float64(covariance)
    # Both triangles are checked, because the factorisation reads only one of them.
    if not c.numel() or not c.isfinite().all():
        return float("nan")
    eigenvalues = torch.linalg.eigvalsh(c).flip(0).clamp(min=0.0)
    total = eigenvalues.sum()
    if not total > 0:
        return float("nan")
    shares = eigenvalues.cumsum(0) / total
    if compat == "delve":
        return float((shares < threshold).sum())
    # A rounding error of the sum must not add a direction.
    return float((shares < threshold * (1 - 1e-12)).sum() + 1)
