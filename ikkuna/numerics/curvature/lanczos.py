r"""The spectrum of a symmetric matrix, computed from its products with vectors.

All functions but :func:`lanczos_coefficients` wait for the device.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.elements import as_float64, on_device

Matvec = Callable[[Tensor], Tensor]
"""A function from ``(size,)`` to ``(size,)`` that multiplies by a symmetric matrix."""
_PART = 65_536


def random_signs(size: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return ``(size,)`` independent random signs, which give the estimate of a trace the smallest variance."""
    signs = torch.randint(2, (size,), generator=generator, device=generator.device)
    return on_device((2 * signs - 1).to(dtype), device) if signs.is_cpu else (2 * signs - 1).to(device, dtype)


class Ritz(NamedTuple):
    """Approximate eigenvalues of a symmetric matrix.

    Parameters
    ----------
    values : Tensor
        ``(steps,)``, float64, in ascending order, in loss / parameter².  There are fewer values if the Krylov space of
        the start is smaller; then they are exact, and an eigenvalue that occurs more than once is returned once.
        A single NaN if a product is not finite; empty for a matrix without rows.
    bounds : Tensor
        ``(steps,)``: the distance of each value to an eigenvalue of the matrix is at most this.
    weights : Tensor
        ``(steps,)``, with sum 1: the squared component of the start along each eigenvector.
    """

    values: Tensor
    bounds: Tensor
    weights: Tensor


class Coefficients(NamedTuple):
    """A tridiagonal matrix, ``(steps, 2)``: its diagonal and what is beside it; and the precision of the vectors."""

    rows: Tensor
    eps: float


def lanczos_coefficients(
    matvec: Matvec,
    size: int,
    steps: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Coefficients:
    r"""Reduce a symmetric matrix to a tridiagonal one (Lanczos 1950), with full re-orthogonalisation.

    On the host the iteration ends as soon as the Krylov space is exhausted; on a device it makes all steps,
    and :func:`ritz_of` ignores those that follow.

    Parameters
    ----------
    matvec : callable
        ``(size,) -> (size,)``.
    size : int
        The number of rows of the matrix.
    steps : int
        The number of products; 4 k + 5 are enough for the k largest eigenvalues if they are well separated.
    generator : torch.Generator
        The generator of the random start.
    dtype : torch.dtype
        The dtype of the vectors.
    device : torch.device or str
        The device of the vectors.

    Returns
    -------
    Coefficients
        On the device of the vectors, without waiting for it.

    Notes
    -----
    It computes ``steps`` products and stores as many vectors; orthogonalisation reads about :math:`steps^2 \cdot size`
    numbers.

    Examples
    --------
    >>> diagonal = torch.tensor([5.0, 2.0, 1.0, -3.0, 0.5])
    >>> start = torch.Generator().manual_seed(0)
    >>> ritz_of(lanczos_coefficients(lambda v: diagonal * v, 5, 5, start, torch.float64)).values.round(decimals=6).tolist()
    [-3.0, 0.5, 1.0, 2.0, 5.0]
    """
    eps, count = torch.finfo(dtype).eps, min(steps, size)
    if count < 1:
        return Coefficients(torch.zeros(0, 2, dtype=torch.float64, device="cpu"), eps)
    basis = torch.empty(count + 1, size, dtype=dtype, device=device)  # each vector is computed in its row
    basis[0] = random_signs(size, generator, dtype, device) / math.sqrt(size)
    rows: list[Tensor] = []
    for j in range(count):
        image = matvec(basis[j]).to(basis)
        middle = _dot(basis[j], image)
        image = torch.addcmul(image, basis[j], middle.to(dtype), value=-1, out=basis[j + 1])
        if j:
            image.addcmul_(basis[j - 1], rows[-1][1].to(dtype), value=-1)
        length = _orthogonalise(image, basis[: j + 1])
        rows.append(torch.stack([middle, torch.where(middle.isfinite(), length, torch.nan)]))
        if image.is_cpu and _ending(torch.stack(rows).tolist(), eps) is not None:
            break
        image.div_(length.to(dtype))
    return Coefficients(torch.stack(rows), eps)


def _ending(rows: list[list[float]], eps: float) -> int | None:
    """Return the number of steps up to one that is not finite or leaves nothing; ``None`` if there is none."""
    scale = 0.0
    for j, row in enumerate(rows):
        scale = max(scale, *map(abs, row))
        if not all(map(math.isfinite, row)) or row[1] <= 100 * eps * scale:
            return j + 1
    return None


def _orthogonalise(vector: Tensor, basis: Tensor) -> Tensor:
    """Subtract from `vector`, in place, its projection onto orthonormal rows, and return the length of the rest.

    One pass leaves errors as large as the subtracted part, so a second pass follows, on the host only if this was most of the vector.
    Two passes are enough (B. Parlett, The symmetric eigenvalue problem, 1980).
    """
    for _ in range(2):
        shares = basis @ vector
        vector.addmv_(basis.mT, shares, alpha=-1)
        square = _dot(vector, vector)
        if vector.is_cpu and not _dot(shares, shares) > square:
            break
    return square.sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product in float64, computed in parts that fit into the cache."""
    parts = [as_float64(x) @ as_float64(y) for x, y in zip(a.split(_PART), b.split(_PART), strict=True)]
    return torch.stack(parts).sum()


def ritz_of(coefficients: Coefficients) -> Ritz:
    """Return the approximate eigenvalues for the result of :func:`lanczos_coefficients`; this waits for its device."""
    rows = coefficients.rows.tolist()
    rows = rows[: _ending(rows, coefficients.eps)]
    if not rows or not all(map(math.isfinite, rows[-1])):
        nothing = torch.full((1 if rows else 0,), torch.nan, dtype=torch.float64, device="cpu")
        return Ritz(nothing, nothing, nothing)
    diagonal, beside = torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1)
    off = beside[:-1]
    values, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1))
    return Ritz(values, beside[-1] * vectors[-1].abs(), vectors[0].square())


class Density(NamedTuple):
    """A spectral density as point masses: nodes, which approximate eigenvalues, and weights with sum 1."""

    nodes: Tensor
    weights: Tensor

    def moment(self, power: int) -> float:
        """Return the mean of a power of the eigenvalues.

        Times the size, the first power gives the trace and the second the squared Frobenius norm.
        """
        return float((self.weights @ self.nodes**power).item())

    def histogram(self, bins: int = 50) -> tuple[Tensor, Tensor]:
        """Return the share of eigenvalues in each of `bins` equal bins, and the ``bins + 1`` edges; empty if undefined."""
        if not len(self.nodes) or not self.nodes.isfinite().all():
            return self.nodes[:0], self.nodes[:0]
        low, high = self.nodes.min().item(), self.nodes.max().item()
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64, device="cpu")
        place = torch.bucketize(self.nodes, edges[1:-1].contiguous(), right=True)
        return torch.zeros(bins, dtype=torch.float64, device="cpu").index_add_(0, place, self.weights), edges


def density_of(starts: Sequence[Coefficients]) -> Density:
    r"""Estimate the density of the eigenvalues by stochastic Lanczos quadrature; this waits for the device.

    For each random start, :func:`ritz_of` gives nodes and weights that integrate polynomials up to degree
    ``2 steps - 1`` exactly over the spectral measure of the start.  Their mean over starts estimates the density of all
    eigenvalues.

    Parameters
    ----------
    starts : sequence of Coefficients
        The coefficients of several random starts.

    Returns
    -------
    Density
        Nodes in loss / parameter², weights without unit.  NaN if a product is not finite; empty without rows or starts.

    References
    ----------
    S. Ubaru, J. Chen and Y. Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature, 2017.
    B. Ghorbani, S. Krishnan and Y. Xiao, An investigation into neural net optimization via Hessian eigenvalue density,
    2019.

    Examples
    --------
    >>> start = torch.Generator().manual_seed(0)
    >>> density = density_of([lanczos_coefficients(lambda v: 2 * v, 100, 20, start, torch.float64) for _ in range(10)])
    >>> round(density.moment(0), 6), round(density.moment(1), 6)
    (1.0, 2.0)
    """
    found = [ritz_of(coefficients) for coefficients in starts]
    empty = torch.zeros(0, dtype=torch.float64, device="cpu")
    nodes = torch.cat([empty, *(ritz.values for ritz in found)])
    return Density(nodes, torch.cat([empty, *(ritz.weights / len(found) for ritz in found)]))
