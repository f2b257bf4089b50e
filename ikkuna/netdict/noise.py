"""The gradient noise scale of a model, measured with micro-batches."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.numerics.float64 import as_float64
from ikkuna.numerics.noise import NoiseScale, fit_noise_scale, noise_scale

__all__ = ["compute_noise_scale", "noise_scale_table", "two_batch_noise_scale"]


def two_batch_noise_scale(small: float, small_sq: float, big: float, big_sq: float) -> NoiseScale:
    r"""Return the noise scale from mean squared gradient norms at two batch sizes.

    This is :func:`~ikkuna.numerics.noise.noise_scale` with a check of the batch sizes.

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
        raise ConfigError(f"the batch sizes must be positive, the second larger than the first; got {small} and {big}")
    return noise_scale(small_sq, big_sq, small, big)


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

    The gradients stored in the model do not change.

    Parameters
    ----------
    model : nn.Module
        The model.
    closure : callable
        Returns the loss of a new micro-batch, without calling ``backward``.  It is called
        ``num_iters * num_average`` times.
    micro_batch_size : int
        The number of samples in a micro-batch.
    num_iters : int
        The number of micro-batches in one round.
    num_average : int
        The number of rounds to average.  More rounds make negative estimates rarer.
    method : {'two_batch', 'curve'}
        ``'two_batch'`` compares the mean squared norm of the micro-batches with the squared norm of their mean.
        ``'curve'`` fits a line through the squared norms of the mean of the first 1, 2, … micro-batches, weighted by
        their number.
    reduction : {'mean', 'sum'}
        Whether the loss is the mean or the sum over the samples.

    Raises
    ------
    ConfigError
        If there are fewer than two iterations, if `method` or `reduction` is unknown, or if the loss does not depend
        on the model.
    """
    if num_iters < 2 or num_average < 1 or micro_batch_size < 1:
        raise ConfigError(
            "the noise scale needs num_iters >= 2, num_average >= 1 and micro_batch_size >= 1, "
            f"got {num_iters}, {num_average} and {micro_batch_size}"
        )
    if method not in ("two_batch", "curve") or reduction not in ("mean", "sum"):
        raise ConfigError(
            f"method must be 'two_batch' or 'curve' and reduction 'mean' or 'sum', got {method!r} and {reduction!r}"
        )
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
    """Yield the squared norm of the gradient of each micro-batch, and of the mean gradient of all so far."""
    total = [as_float64(torch.zeros_like(p)) for p in parameters]
    for i in range(num_iters):
        gradients = _gradients(closure(), parameters)
        small = 0.0
        for accumulated, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                exact = as_float64(gradient) * scale
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
