r"""The spectrum of a symmetric matrix that is only known by its products with vectors.

Randomness comes from a generator of one's own.  All of it waits for a device.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Density", "Matvec", "Ritz", "lanczos", "random_signs", "spectral_density"]

Matvec = Callable[[Tensor], Tensor]
"""A function from ``(size,)`` to ``(size,)`` that multiplies by a symmetric matrix."""
_PART = 65_536


def random_signs(size: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return ``(size,)`` independent signs: of all random vectors their products vary the least."""
    signs = torch.randint(2, (size,), generator=generator, device=generator.device)
    return (2 * signs - 1).to(device, dtype)


def _own(generator: torch.Generator | None) -> torch.Generator:
    return generator or torch.Generator().manual_seed(0)


class Ritz(NamedTuple):
    """What Lanczos found: rising approximations of eigenvalues, their error bounds, and their weights in the start."""

    values: Tensor
    bounds: Tensor
    weights: Tensor


def lanczos(
    matvec: Matvec,
    size: int,
    steps: int = 25,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Ritz:
    r"""Approximate the extreme eigenvalues of a symmetric matrix (Lanczos 1950), with full re-orthogonalisation.

    Parameters
    ----------
    matvec : callable
        ``(size,) -> (size,)``.
    size : int
        Rows of the matrix.
    steps : int
        Products to take; 4 k + 5 for the k largest eigenvalues is enough where they stand apart.
    generator : torch.Generator, optional
        Of the random start; by default a new one with seed 0.
    dtype, device
        Of the vectors.

    Returns
    -------
    values : Tensor
        ``(steps,)``, float64, rising, in loss / parameter²: the largest are last, the most negative first.  Fewer if
        the start is
        exhausted before: then they are exact, but an eigenvalue that occurs more than once is there once.
        A single NaN if a product is not finite; empty for ``size = 0``.
    bounds : Tensor
        ``(steps,)``: an eigenvalue of the matrix lies within this of each value.
    weights : Tensor
        ``(steps,)``, with sum 1: the squared share of each direction in the start.

    Notes
    -----
    ``steps`` products and as many stored vectors; orthogonalisation reads them about :math:`steps` times,
    :math:`steps^2 \cdot size` numbers in all.

    Examples
    --------
    >>> diagonal = torch.tensor([5.0, 2.0, 1.0, -3.0, 0.5])
    >>> lanczos(lambda v: diagonal * v, 5, dtype=torch.float64).values.round(decimals=6).tolist()
    [-3.0, 0.5, 1.0, 2.0, 5.0]
    """
    count = min(steps, size)
    empty = torch.zeros(0, dtype=torch.float64)
    if count < 1:
        return Ritz(empty, empty, empty)
    basis = torch.empty(count + 1, size, dtype=dtype, device=device)  # each vector is made in its place
    basis[0] = random_signs(size, _own(generator), dtype, device) / math.sqrt(size)
    diagonal: list[float] = []
    beside: list[float] = []
    for j in range(count):
        image = matvec(basis[j]).to(basis)
        diagonal.append(_dot(basis[j], image))
        image = torch.sub(image, basis[j], alpha=diagonal[-1], out=basis[j + 1])
        if j:
            image.sub_(basis[j - 1], alpha=beside[-1])
        length = _orthogonalise(image, basis[: j + 1])
        beside.append(length if math.isfinite(diagonal[-1]) else math.nan)
        if not math.isfinite(beside[-1]):
            nan = torch.full((1,), torch.nan, dtype=torch.float64)
            return Ritz(nan, nan, nan)
        scale = max(abs(a) for a in diagonal + beside)
        exhausted = beside[-1] <= 100 * torch.finfo(dtype).eps * scale
        if exhausted or j + 1 == count:
            break
        image.div_(beside[-1])
    return _ritz(diagonal, beside)


def _orthogonalise(vector: Tensor, basis: Tensor) -> float:
    """Take out of `vector`, in place, what it has of orthonormal rows, and return its length.

    Once leaves errors of the size of what is taken out, so it is done again where that was most of the vector: then twice is enough
    (B. Parlett, The symmetric eigenvalue problem, 1980).
    """
    for _ in range(2):
        shares = basis @ vector
        vector.addmv_(basis.mT, shares, alpha=-1)
        square = _dot(vector, vector)
        if not _dot(shares, shares) > square:
            break
    return math.sqrt(square)


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product in float64, a part at a time, which stays in cache: rounding of its own would show in eigenvalues."""
    parts = [x.double() @ y.double() for x, y in zip(a.split(_PART), b.split(_PART), strict=True)]
    return torch.stack(parts).sum().item()


def _ritz(diagonal: list[float], beside: list[float]) -> Ritz:
    off = torch.tensor(beside[:-1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return Ritz(values, beside[-1] * vectors[-1].abs(), vectors[0].square())


class Density(NamedTuple):
    """A spectral density as point masses: eigenvalue-like nodes, and weights that add up to 1."""

    nodes: Tensor
    weights: Tensor

    def moment(self, power: int) -> float:
        """Return the mean of the eigenvalues to a power: times the size, the trace for 1 and the squared norm for 2."""
        return float((self.weights @ self.nodes**power).item())

    def histogram(self, bins: int = 50) -> tuple[Tensor, Tensor]:
        """Return the share of eigenvalues in each of `bins` equal bins, and their ``bins + 1`` edges; empty if
        undefined.
        """
        if not len(self.nodes) or not self.nodes.isfinite().all():
            return self.nodes[:0], self.nodes[:0]
        low, high = self.nodes.min().item(), self.nodes.max().item()
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        place = torch.bucketize(self.nodes, edges[1:-1].contiguous(), right=True)
        return torch.zeros(bins, dtype=torch.float64).index_add_(0, place, self.weights), edges


def spectral_density(
    matvec: Matvec,
    size: int,
    steps: int = 20,
    probes: int = 10,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Density:
    r"""Estimate how the eigenvalues of a symmetric matrix are spread, by stochastic Lanczos quadrature.

    Each random start gives, by :func:`lanczos`, nodes and weights that integrate polynomials up to degree ``2 steps -
    1`` exactly over
    its own spectrum; their mean over starts estimates the density of all eigenvalues.

    Parameters
    ----------
    matvec, size, generator, dtype, device
        As for :func:`lanczos`.
    steps : int
        Products for each start.
    probes : int
        Starts.

    Returns
    -------
    Density
        Nodes in loss / parameter², weights without unit.  NaN if a product is not finite, empty without rows or probes.

    Notes
    -----
    ``steps * probes`` products.

    References
    ----------
    S. Ubaru, J. Chen and Y. Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature, 2017.
    B. Ghorbani, S. Krishnan and Y. Xiao, An investigation into neural net optimization via Hessian eigenvalue
    density, 2019.

    Examples
    --------
    >>> density = spectral_density(lambda v: 2 * v, 100, dtype=torch.float64)
    >>> round(density.moment(0), 6), round(density.moment(1), 6)
    (1.0, 2.0)
    """
    own = _own(generator)
    found = [lanczos(matvec, size, steps, own, dtype, device) for _ in range(probes)]
    empty = torch.zeros(0, dtype=torch.float64)
    nodes = torch.cat([empty, *(ritz.values for ritz in found)])
    return Density(nodes, torch.cat([empty, *(ritz.weights / probes for ritz in found)]))
