r"""Singular values of matrices: norms, condition numbers, ranks and the tail of the spectrum.

Singular values are written :math:`\sigma_1 \ge \sigma_2 \ge \dots`, with :math:`\lambda = \sigma^2`,
:math:`p = \lambda / \sum \lambda` and :math:`q = \sigma / \sum \sigma`.  For every nonzero matrix, :math:`1 \le` stable
rank :math:`\le` participation ratio :math:`\le` entropy rank :math:`\le` effective rank :math:`\le` rank.

No function waits for the device unless its documentation says so.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import as_float64, dense, widest_float

_EXACT_STEPS = 64
_COLD_STEPS = 32
_TINY = 1.2e-38  # the smallest divisor with full precision in float32


def as_matrix(weight: Tensor) -> Tensor:
    r"""Return `weight` as a real matrix ``(out, in * kernel)`` of float32 or float64; a vector becomes one column.

    A complex weight :math:`A + i B` becomes :math:`\begin{pmatrix} A & -B \\ B & A \end{pmatrix}`, ``(2 * out, 2 * in * kernel)``,
    which has each of its singular values twice.

    Examples
    --------
    >>> as_matrix(torch.ones(8, 3, 5, 5)).shape
    torch.Size([8, 75])
    """
    weight = dense(weight)
    matrix = weight.flatten(1) if weight.ndim > 1 else weight.reshape(-1, 1)
    if matrix.is_complex():
        a, b = matrix.real, matrix.imag
        matrix = torch.cat([torch.cat([a, -b], 1), torch.cat([b, a], 1)])
    return matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()


def spectral_norm(weight: Tensor, u: Tensor | None = None, iterations: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    r"""Estimate the largest singular value :math:`\sigma_1` of a matrix, its error, and a start for the next call.

    One iteration is :math:`s = |W^\top u|,\; v = W^\top u / s,\; \sigma = |W v|,\; u \leftarrow W v / \sigma`.
    It reduces the error by :math:`(\sigma_2 / \sigma_1)^2`.  Without `u`, Golub-Kahan bidiagonalisation computes the
    start.

    Parameters
    ----------
    weight : Tensor
        ``(out, in, ...)``, read as a matrix ``(out, in * ...)``; for the operator norm of a convolution see
        :func:`conv_operator_norm`.  Of any floating or complex dtype, any layout; for a vector the result is its Euclidean norm.
    u : Tensor, optional
        ``(out,)``, complex weights ``(2 * out,)``, from the previous call for this weight.  A vector of another size or device is ignored.
    iterations : int
        The number of iterations, at least 1; each costs two products of the matrix with a vector.

    Returns
    -------
    sigma : Tensor
        0-d, in units of `weight`; never above :math:`\sigma_1`, except by rounding.  NaN if an element is not finite or
        `weight` is empty.
    residual : Tensor
        0-d, :math:`r = |W v - s u| / s` of the last iteration.  The distance of `sigma` to a singular value is at most
        :math:`r (1 + r / 2) \sigma`; below 1e-3 the iteration has converged. 0 for the zero matrix.
    u : Tensor
        ``(out,)``, complex weights ``(2 * out,)``, a unit vector, always finite.

    Raises
    ------
    ConfigError
        If `iterations` is not positive.

    Notes
    -----
    The first call does 32 steps of Golub-Kahan with full re-orthogonalisation from a fixed start; the error for a
    random 1024 x 1024 matrix is then 1e-3.  For a matrix with at most 64 rows or columns it does all steps and is
    exact.
    It costs that many products of the matrix with a vector, and 33 vectors of either size.
    On the host, a matrix whose norm is below 1e-37 or above 1e150 is divided by its largest element before the squares are taken.

    References
    ----------
    G. Golub and W. Kahan, Calculating the singular values and pseudo-inverse of a matrix, 1965.
    T. Miyato et al., Spectral normalization for generative adversarial networks, 2018 (the warm start).

    Examples
    --------
    >>> sigma, residual, u = spectral_norm(torch.diag(torch.tensor([3.0, 1.0, 2.0])))
    >>> round(sigma.item(), 5), round(residual.item(), 3)
    (3.0, 0.0)
    """
    if iterations < 1:
        raise ConfigError(f"spectral_norm needs at least 1 iteration, got {iterations!r}")
    w = as_matrix(weight)
    if not w.numel() or w.is_meta:
        nan = torch.tensor(torch.nan, dtype=w.dtype, device="cpu")
        return (
            nan,
            nan.clone(),
            torch.full((w.shape[0],), w.shape[0] ** -0.5 if w.shape[0] else 0.0, dtype=w.dtype, device="cpu"),
        )
    if u is None or u.shape != w.shape[:1] or u.device != w.device:
        u = _golub_kahan(w)
    u = before = u.to(w.dtype)
    for _ in range(iterations - 1):
        u = _step(w, u)[-1]
    s, sigma, y, after = _step(w, u)
    if w.is_cpu and _is_extreme(sigma) and 0 < (scale := w.abs().amax()) < torch.inf and scale != 1:
        sigma, residual, after = spectral_norm(w / scale, before, iterations)
        return sigma * scale, residual, after
    residual = _length(y - s * u) / s.clamp_min(_TINY)
    # The start of later calls must not become zero or NaN.
    usable = (sigma > 0) & (sigma < torch.inf)
    return sigma.to(w.dtype), residual.to(w.dtype), torch.where(usable, after, before)


def _is_extreme(sigma: Tensor) -> bool:
    """Return whether squares or divisors may have been out of range; on an accelerator this would wait."""
    return not 1e-37 < sigma < 1e150


def _step(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s, v = _normalize(w.mT @ u)
    y = w @ v
    sigma, after = _normalize(y)
    return s, sigma, y, after


def _length(x: Tensor) -> Tensor:
    """Return the Euclidean norm along the last axis, in float64 so that no square overflows or underflows."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=widest_float(x))
    return length


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    length = _length(x)
    return length, x / length.clamp_min(_TINY)


def _flat_unit(n: int, like: Tensor) -> Tensor:
    """Return a fixed unit vector without structure, so that a weight is unlikely to be orthogonal to it."""
    angles = torch.arange(n, device=like.device, dtype=like.dtype).square()
    return _normalize(angles.cos())[1]


def _golub_kahan(w: Tensor) -> Tensor:
    """Return the leading left singular vector of `w` in the Krylov space of a fixed start."""
    steps = min(w.shape) if min(w.shape) <= _EXACT_STEPS else _COLD_STEPS
    w = w / torch.where(w.abs().amax() > 0, w.abs().amax(), 1.0)
    left, right = w.new_zeros(steps, w.shape[0]), w.new_zeros(steps, w.shape[1])
    start = _flat_unit(w.shape[0], w)
    right[0] = _normalize(w.mT @ start)[1]  # in the row space, so that as many steps as the rank are enough
    for j in range(steps):
        left[j] = _next_direction(w @ right[j], left[:j])
        if j + 1 < steps:
            right[j + 1] = _next_direction(w.mT @ left[j], right[: j + 1])
    projected = left @ w @ right.mT
    found = _leading_vector(projected @ projected.mT) @ left
    square = found.square().sum()
    # Any unit vector will do for a matrix that is zero or not finite.
    return torch.where((square > 0.25) & (square < 4), found, start)


def _next_direction(x: Tensor, basis: Tensor) -> Tensor:
    """Return the normalised component of `x` orthogonal to `basis`; zero if it is rounding noise."""
    before = _length(x)
    for _ in range(2):  # one pass leaves errors as large as the subtracted part
        x = x - (basis @ x) @ basis
    length, direction = _normalize(x)
    noise = 10 * torch.finfo(x.dtype).eps * before
    return torch.where(length > noise, direction, torch.zeros_like(direction))


def _leading_vector(gram: Tensor) -> Tensor:
    """Return a unit vector in the leading eigenspace of a small positive matrix, computed by squaring it sixteen times."""
    for _ in range(16):
        gram = gram / torch.where(gram.abs().amax() > 0, gram.abs().amax(), 1.0)
        gram = gram @ gram
    columns = gram.mT
    best = _length(columns).argmax()
    return _normalize(columns.index_select(0, best.reshape(1)).squeeze(0))[1]


def conv_operator_norm(weight: Tensor, size: int | tuple[int, ...], groups: int = 1) -> Tensor:
    r"""Return the exact operator norm of a convolution with stride 1 and circular padding on an input of `size`.

    Such a convolution is a matrix for each frequency :math:`f` of the discrete Fourier transform,
    :math:`\|K\| = \max_f \sigma_1(\hat K_f)`, with :math:`\hat K_f` of shape ``(out, in)``.

    Parameters
    ----------
    weight : Tensor
        ``(out, in / groups, k...)`` with one to three kernel axes; a transposed convolution has the same norm.
    size : int or tuple of int
        The width of the input along each of the kernel axes.
    groups : int
        The number of groups of channels.

    Returns
    -------
    Tensor
        0-d, in units of `weight`.  NaN if an element is not finite or `weight` is empty.  It is a close upper bound for
        zero padding, and between 1 and :math:`\sqrt{\prod k}` times the norm of the reshaped matrix.

    Raises
    ------
    ConfigError
        If there is no kernel axis, or `size` does not fit them.

    Notes
    -----
    It costs ``prod(size) / 2`` singular value decompositions of ``(out, in)``: half a second for a weight of
    64 x 64 x 3 x 3 and an input of 32 x 32.  It waits for the device.

    References
    ----------
    H. Sedghi, V. Gupta and P. Long, The singular values of convolutional layers, 2018.

    Examples
    --------
    >>> conv_operator_norm(torch.ones(1, 1, 3, 3), 8).item()      # a constant image is multiplied by 9
    9.0
    """
    axes = weight.ndim - 2
    sizes = (size,) * axes if isinstance(size, int) else tuple(size)
    if not 1 <= axes <= 3 or len(sizes) != axes or min(sizes) < 1 or groups < 1:
        raise ConfigError(
            f"conv_operator_norm needs a weight (out, in, kernel...) and as many positive sizes as it has kernel axes, "
            f"got the shape {tuple(weight.shape)}, size={size!r}, groups={groups!r}"
        )
    kernel = weight.detach().to(torch.complex128 if weight.is_complex() else torch.float64)
    if not kernel.numel() or kernel.is_meta:
        return torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
    is_finite = kernel.isfinite().all()
    kernel = torch.where(is_finite, kernel, 0.0)  # a factorisation raises an error for a NaN
    for axis, n in enumerate(sizes, start=2):
        kernel = _wrap(kernel, axis, n)
    transform = torch.fft.fftn if kernel.is_complex() else torch.fft.rfftn
    transformed = transform(kernel, s=sizes, dim=tuple(range(2, kernel.ndim)))
    by_group = transformed.reshape(groups, -1, *transformed.shape[1:])
    per_frequency = by_group.movedim((1, 2), (-2, -1))
    values: Tensor = torch.linalg.svdvals(per_frequency)
    return torch.where(is_finite, values.amax(), torch.nan)


def _wrap(kernel: Tensor, axis: int, n: int) -> Tensor:
    """Sum the elements of a kernel longer than the input that are multiplied with the same element of it."""
    if kernel.shape[axis] <= n:
        return kernel
    parts = torch.split(kernel, n, dim=axis)
    whole = torch.zeros_like(parts[0])
    for part in parts:
        whole.narrow(axis, 0, part.shape[axis]).add_(part)
    return whole


def singular_values_of_each(weights: Tensor) -> Tensor:
    r"""Return the singular values of several weights of one shape in float64, in descending order, with one factorisation.

    Parameters
    ----------
    weights : Tensor
        ``(n, out, in, ...)``, with elements.

    Returns
    -------
    Tensor
        ``(n, min(out, in * ...))``, in units of the weights, on their device.  Values below
        :math:`\max(m, n)\, \epsilon_{64}\, \sigma_1` are rounding errors of the factorisation and become 0.  All NaN for a weight
        with an element that is not finite.

    Notes
    -----
    :math:`4 m n^2 - 4 n^3 / 3` operations and a float64 copy: half a second for 1024 x 1024.  It waits for the device.

    Examples
    --------
    >>> singular_values_of_each(torch.stack([torch.eye(2), torch.full((2, 2), torch.nan)]))
    tensor([[1., 1.],
            [nan, nan]], dtype=torch.float64)
    """
    matrices = as_float64(torch.stack([as_matrix(weight) for weight in weights]))
    # A factorisation raises an error for a NaN, or ignores it in a triangle that it does not read.
    is_finite = matrices.isfinite().flatten(1).all(1)[:, None]
    matrices = torch.where(is_finite[..., None], matrices, 0.0)
    scale = matrices.abs().flatten(1).amax(1)[:, None]
    values = _factorised(matrices / torch.where(scale > 0, scale, 1.0)[..., None]) * scale
    values = values[:, :: 1 + weights.is_complex()]
    noise = max(matrices.shape[1:]) * torch.finfo(torch.float64).eps * values[:, :1]
    return torch.where(is_finite, torch.where(values <= noise, 0.0, values), torch.nan)


def _factorised(matrices: Tensor) -> Tensor:
    try:
        values: Tensor = torch.linalg.svdvals(matrices)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no convergence; torch documents this class
        if len(matrices) > 1:
            return torch.cat([_factorised(matrix) for matrix in matrices.split(1)])
        values = matrices.new_full((1, min(matrices.shape[1:])), torch.nan)
    return values


def _scaled(sigma: Tensor) -> Tensor:
    """Return `sigma` divided by its largest value; NaN for an empty or zero spectrum, or one with a NaN."""
    if not sigma.numel():
        return torch.full((1,), torch.nan, dtype=torch.float64, device="cpu")
    largest = sigma.amax()
    return sigma / torch.where(largest > 0, largest, torch.nan)


def condition_number(sigma: Tensor) -> Tensor:
    r"""Return :math:`\kappa = \sigma_1 / \sigma_{\min}`, at least 1.

    A growing value means that the weight loses directions.  1e3 is common; at 1e6 the smallest directions are rounding
    errors in half precision.

    Parameters
    ----------
    sigma : Tensor
        ``(n,)``, the singular values.

    Returns
    -------
    Tensor
        0-d, dimensionless.  Infinite if a value is 0; NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> condition_number(torch.tensor([4.0, 2.0, 1.0])).item()
    4.0
    """
    return 1.0 / _scaled(sigma).amin()


def stable_rank(sigma: Tensor) -> Tensor:
    r"""Return :math:`\sum \lambda / \lambda_1 = \|W\|_F^2 / \sigma_1^2`, between 1 and the rank.

    This is the stable rank of Rudelson and Vershynin (2007).

    NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> round(stable_rank(torch.tensor([3.0, 1.0])).item(), 3)
    1.111
    """
    return _scaled(sigma).square().sum()


def participation_ratio(sigma: Tensor) -> Tensor:
    r"""Return :math:`(\sum \lambda)^2 / \sum \lambda^2`, between 1 and the rank.

    It is the number of directions that hold the variance.

    A fall towards 1 for activations is a collapse of the representation.  NaN for the zero matrix, without values, and
    for a NaN.

    Examples
    --------
    >>> round(participation_ratio(torch.tensor([3.0, 1.0])).item(), 3)
    1.22
    """
    eigenvalues = _scaled(sigma).square()
    return eigenvalues.sum().square() / eigenvalues.square().sum()


def effective_rank(sigma: Tensor) -> Tensor:
    r"""Return the effective rank :math:`\exp(-\sum q \ln q)` of Roy and Vetterli (2007), between 1 and the rank.

    NaN for the zero matrix, without values, and for a NaN.

    Examples
    --------
    >>> round(effective_rank(torch.tensor([3.0, 1.0])).item(), 3)
    1.755
    """
    weights = _scaled(sigma)
    rank: Tensor = torch.special.entr(weights / weights.sum()).sum().exp()
    return rank


class PowerLaw(NamedTuple):
    r"""A power law :math:`\lambda^{-\alpha}` fitted to the tail of a spectrum; NaN and ``n_tail = 0`` if none fits."""

    alpha: float
    ks_distance: float
    x_min: float
    n_tail: int


def power_law_alpha(eigenvalues: Tensor, compat: str | None = None) -> PowerLaw:
    r"""Fit a power law to the largest eigenvalues :math:`\lambda = \sigma^2` of a weight.

    For every candidate :math:`x_\min` among the values the maximum-likelihood exponent is
    :math:`\alpha = 1 + n / \sum_{\lambda_i \ge x_\min} \ln(\lambda_i / x_\min)`.
    The result is the candidate with the smallest Kolmogorov-Smirnov distance to the data.

    Parameters
    ----------
    eigenvalues : Tensor
        ``(n,)``, in any order; eigenvalues that are not positive and finite are left out.
    compat : {None, 'weightwatcher'}
        By default the distance is that of Kolmogorov and Smirnov, taken on both sides of each step of the empirical
        distribution function.  ``'weightwatcher'`` takes it before each step only, as that library does, and therefore
        chooses another tail for some matrices.

    Returns
    -------
    alpha : float
        Dimensionless, above 1; its standard error is :math:`(\alpha - 1) / \sqrt{n_{tail}}`.  Trained layers have 2 to
        6, random layers more.
    ks_distance : float
        In [0, 1].  Above about 0.1 the tail does not follow a power law, and `alpha` has no meaning.
    x_min : float
        The start of the tail, in units of the eigenvalues.
    n_tail : int
        The number of eigenvalues in the tail.

        The result is NaN, NaN, NaN, 0 for fewer than two distinct values.

    Notes
    -----
    The time grows as :math:`n^2`: 0.2 s for 2,000 values, on the host.

    ``compat="weightwatcher"`` gives the numbers of the package powerlaw 2.0.0 with ``parameter_ranges={"alpha": [1, 1000]}``
    (without, that package looks no further than :math:`\alpha = 3`).  Random matrices, numpy's generator with seed 0:

    ==================  ===========  ====================  ==================  ====================
    matrix              this alpha   this distance         that alpha          that distance
    ==================  ===========  ====================  ==================  ====================
    normal, 64 × 64     3.9116       0.1595                3.9116              0.1595
    Student t3, 64²     4.6438       0.1577                5.1092              0.1380
    normal, 256 × 128   4.7572       0.1345                14.6237             0.1167
    t3, 256 × 128       6.4785       0.1001                6.9301              0.0835
    normal, 512 × 512   5.4587       0.1314                5.4587              0.1314
    t3, 512 × 512       7.4526       0.0627                7.4526              0.0376
    ==================  ===========  ====================  ==================  ====================

    References
    ----------
    A. Clauset, C. Shalizi and M. Newman, Power-law distributions in empirical data, 2009.
    C. Martin and M. Mahoney, Implicit self-regularization in deep neural networks, 2021.

    Examples
    --------
    >>> quantiles = (torch.arange(200.0).double() + 0.5) / 200
    >>> fit = power_law_alpha((1 - quantiles) ** (-1 / 1.5))      # a Pareto distribution with alpha = 2.5
    >>> round(fit.alpha, 1), fit.ks_distance < 0.02
    (2.5, True)
    """
    if compat not in (None, "weightwatcher"):
        raise ConfigError(f"power_law_alpha needs compat None or 'weightwatcher', got {compat!r}")
    values = as_float64(eigenvalues).cpu().numpy().ravel()
    values = np.sort(values[np.isfinite(values) & (values > 0)])
    if len(np.unique(values)) < 2:
        return PowerLaw(math.nan, math.nan, math.nan, 0)
    logs = np.log(values)
    starts = np.flatnonzero(np.r_[True, np.diff(values) > 0])[:-1]  # the largest value alone is not a tail
    tails = len(values) - starts
    alphas = 1 + tails / (np.cumsum(logs[::-1])[::-1][starts] - tails * logs[starts])
    distances = [_distance(logs[s:], a, compat is None) for s, a in zip(starts, alphas, strict=True)]
    best = int(np.argmin(distances))
    return PowerLaw(float(alphas[best]), float(distances[best]), float(values[starts[best]]), int(tails[best]))


def _distance(logs: NDArray[np.float64], alpha: float, both_sides: bool) -> float:
    """Return the largest distance between the power law from ``logs[0]`` on and the empirical distribution function."""
    n = len(logs)
    law = -np.expm1((1 - alpha) * (logs - logs[0]))
    steps = np.arange(n + 1) / n
    if both_sides:
        return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))
    return float(np.abs(law - steps[:-1]).max())
