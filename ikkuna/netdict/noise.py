r"""The gradient noise scale: the batch size beyond which a larger batch mostly averages what is already known.

After McCandlish, Kaplan, Amodei & the OpenAI Dota team, *An Empirical Model of Large-Batch Training* (2018).
Expected squared gradient norms at batch size :math:`B` lie on the line :math:`|G|^2 + \operatorname{tr}(\Sigma) / B`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError

__all__ = [
    "NoiseScale",
    "compute_noise_scale",
    "fit_noise_scale",
    "noise_scale_from_moments",
    "noise_scale_table",
    "two_batch_noise_scale",
]


@dataclass(frozen=True)
class NoiseScale:
    r"""An estimate of the noise scale :math:`\operatorname{tr}(\Sigma) / |G|^2`, in samples.

    Parameters
    ----------
    grad_sq : :math:`|G|^2`, squared norm of the true gradient; both estimates are unbiased, and may fall below 0
    trace : :math:`\operatorname{tr}(\Sigma)`, variance of a single sample's gradient, summed over parameters
    batch_sizes, grad_sqs : the measured squared norms, for a plot of the line
    """

    grad_sq: float
    trace: float
    batch_sizes: tuple[float, ...] = field(default=(), repr=False)
    grad_sqs: tuple[float, ...] = field(default=(), repr=False)

    @property
    def valid(self) -> bool:
        """Whether the squared norm came out positive; otherwise more iterations are needed."""
        return self.grad_sq > 0

    @property
    def noise_scale(self) -> float:
        """The ratio, or NaN where it means nothing."""
        return self.trace / self.grad_sq if self.valid else math.nan


def two_batch_noise_scale(small: float, small_sq: float, big: float, big_sq: float) -> NoiseScale:
    r"""Return the noise scale from mean squared gradient norms at two batch sizes.

    .. math::
        |G|^2 = \frac{B_b g_b - B_s g_s}{B_b - B_s}, \qquad
        \operatorname{tr}(\Sigma) = \frac{g_s - g_b}{1/B_s - 1/B_b}

    Raises
    ------
    ConfigError
        Unless ``0 < small < big``.

    Examples
    --------
    >>> two_batch_noise_scale(10, 14.0, 50, 6.0).noise_scale
    25.0
    """
    if not 0 < small < big:
        raise ConfigError(f"the two batch sizes must be positive and rising, got {small} and {big}")
    grad_sq = (big * big_sq - small * small_sq) / (big - small)
    trace = (small_sq - big_sq) / (1 / small - 1 / big)
    return NoiseScale(grad_sq, trace, (small, big), (small_sq, big_sq))


def fit_noise_scale(
    batch_sizes: Sequence[float], grad_sqs: Sequence[float], weights: Sequence[float] | None = None
) -> NoiseScale:
    """Return the noise scale from a least-squares line through squared gradient norms against ``1 / batch size``.

    Raises
    ------
    ConfigError
        For fewer than two different batch sizes, or lists of different lengths.

    Examples
    --------
    >>> fit = fit_noise_scale([10, 20, 50, 100], [14.0, 9.0, 6.0, 5.0])
    >>> round(fit.grad_sq, 9), round(fit.trace, 9)
    (4.0, 100.0)
    """
    w = [1.0] * len(batch_sizes) if weights is None else list(weights)
    if not len(batch_sizes) == len(grad_sqs) == len(w):
        raise ConfigError(f"got {len(batch_sizes)} batch sizes, {len(grad_sqs)} squared norms and {len(w)} weights")
    if len(set(batch_sizes)) < 2:
        raise ConfigError("a line needs at least two different batch sizes")
    x = [1 / size for size in batch_sizes]
    total = math.fsum(w)
    mean_x = math.fsum(a * b for a, b in zip(w, x, strict=True)) / total
    mean_y = math.fsum(a * b for a, b in zip(w, grad_sqs, strict=True)) / total
    covariance = math.fsum(a * (b - mean_x) * (c - mean_y) for a, b, c in zip(w, x, grad_sqs, strict=True))
    slope = covariance / math.fsum(a * (b - mean_x) ** 2 for a, b in zip(w, x, strict=True))
    return NoiseScale(mean_y - slope * mean_x, slope, tuple(batch_sizes), tuple(grad_sqs))


def noise_scale_from_moments(gradient: Tensor, covariance: Tensor, hessian: Tensor | None = None) -> NoiseScale:
    r"""Return :math:`\operatorname{tr}(H\Sigma) / G^\top H G` of a known gradient; :math:`H = I` by default.

    Examples
    --------
    >>> G, H = torch.tensor([1.0, 4.0]), torch.diag(torch.tensor([1.0, 4.0]))
    >>> estimate = noise_scale_from_moments(G, torch.diag(torch.tensor([2.0, 16.0])), H)
    >>> estimate.trace, estimate.grad_sq
    (66.0, 65.0)
    """
    g, s = gradient.double().reshape(-1), covariance.double()
    h = torch.eye(g.numel(), dtype=torch.float64) if hessian is None else hessian.double()
    return NoiseScale(float(g @ h @ g), float(torch.trace(h @ s)))


def compute_noise_scale(
    model: nn.Module,
    closure: Callable[[], Tensor],
    micro_batch_size: int,
    num_iters: int = 100,
    num_average: int = 1,
    *,
    method: str = "two_batch",
    reduction: str = "mean",
) -> NoiseScale:
    """Estimate the noise scale from the gradients of `num_iters` micro-batches.

    Each of ``num_iters * num_average`` calls of ``closure()`` returns the loss of a new micro-batch, without calling
    ``backward``.  Gradients stored in the model, and all else that `closure` leaves alone, stay as they are.

    Parameters
    ----------
    micro_batch_size : int
        Samples in each call.
    num_average : int
        How many such rounds are averaged; estimates below 0 become rarer.
    method : {'two_batch', 'curve'}
        Compare the micro-batches' mean squared norm with that of their average, or fit a line through the squared norms
        of the average of the first 1, 2, … micro-batches, weighted by their number.
    reduction : {'mean', 'sum'}
        Whether the loss is the mean or the sum over the samples.

    Raises
    ------
    ConfigError
        For fewer than two iterations, an unknown word, or a loss that does not depend on the model.
    """
    if num_iters < 2 or num_average < 1 or micro_batch_size < 1:
        raise ConfigError("the noise scale needs at least 2 iterations, 1 round and 1 sample in a micro-batch")
    if method not in ("two_batch", "curve") or reduction not in ("mean", "sum"):
        raise ConfigError(f"method is 'two_batch' or 'curve', reduction 'mean' or 'sum'; got {method!r}, {reduction!r}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    scale = 1.0 if reduction == "mean" else 1.0 / micro_batch_size
    micro, nested = [0.0] * num_iters, [0.0] * num_iters
    for _ in range(num_average):
        for i, (small, big) in enumerate(_squared_norms(closure, parameters, num_iters, scale)):
            micro[i] += small / num_average
            nested[i] += big / num_average
    sizes = [micro_batch_size * (i + 1) for i in range(num_iters)]
    if method == "curve":
        return fit_noise_scale(sizes, nested, sizes)
    return two_batch_noise_scale(sizes[0], math.fsum(micro) / num_iters, sizes[-1], nested[-1])


def _squared_norms(
    closure: Callable[[], Tensor], parameters: list[nn.Parameter], num_iters: int, scale: float
) -> Iterable[tuple[float, float]]:
    """Yield the squared norm of each micro-batch's gradient, and of the average of all so far."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for i in range(num_iters):
        gradients = _gradients(closure(), parameters)
        small = 0.0
        for accumulated, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                exact = gradient.double() * scale
                accumulated += exact
                small += float((exact * exact).sum())
        yield small, math.fsum(float((t * t).sum()) for t in total) / (i + 1) ** 2


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ConfigError("the closure must return the loss of a micro-batch, as a tensor that depends on the model")
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def noise_scale_table(results: Iterable[tuple[str, str, float | NoiseScale]]) -> str:
    """Return (model, dataset, noise scale) triples as a markdown table.

    Examples
    --------
    >>> print(noise_scale_table([("GPT-2 baby", "OpenWebText", 25.0)]))
    | Model      | Dataset     | Noise Scale |
    | ---------- | ----------- | ----------- |
    | GPT-2 baby | OpenWebText | 25          |
    """
    rows = [("Model", "Dataset", "Noise Scale"), *((m, d, _number(scale)) for m, d, scale in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2]))
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _number(scale: float | NoiseScale) -> str:
    value = scale.noise_scale if isinstance(scale, NoiseScale) else scale
    return "" if math.isnan(value) else f"{value:.4g}"
