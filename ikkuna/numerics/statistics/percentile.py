r"""Exact percentiles of a tensor of any size, by sorting, with numpy's ``linear`` interpolation between two elements."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import flatten, host_array, readable

__all__ = ["SIGMA", "percentiles"]

SIGMA = (0.13, 2.28, 15.87, 50.0, 84.13, 97.72, 99.87)
"""The percentiles of a normal distribution at its mean, and 1, 2 and 3 standard deviations below and above it."""


def percentiles(x: Tensor | Sequence[Tensor], q: Sequence[float] = SIGMA) -> list[float]:
    r"""Return the `q`-th percentiles of the elements of `x`.

    With the elements sorted, :math:`h = (n - 1)\, q / 100` and :math:`f = h - \lfloor h \rfloor`,
    the percentile is :math:`x_{\lfloor h \rfloor} + f\,(x_{\lfloor h \rfloor + 1} - x_{\lfloor h \rfloor})`.
    On the CPU numpy's vectorised sort is used, which costs as much as 30 sums over the tensor
    (``torch.quantile`` costs 270, and is limited to 2**24 elements).

    Parameters
    ----------
    x : Tensor or sequence of Tensor
        Any shape and dtype; several tensors are pooled.
    q : sequence of float
        From 0 to 100.

    Returns
    -------
    list of float
        All NaN if there are no elements, or if one is NaN.

    Raises
    ------
    ConfigError
        If a percentile is not between 0 and 100.

    Examples
    --------
    >>> percentiles(torch.tensor([10.0, 30.0, 20.0]), [0, 50, 75])
    [10.0, 20.0, 25.0]
    """
    if wrong := [p for p in q if not 0 <= p <= 100]:
        raise ConfigError(f"a percentile must be between 0 and 100, got {wrong[0]}")
    values = _sorted(_pool([x] if isinstance(x, Tensor) else x))
    n = values.shape[0]
    if n == 0 or bool(np.isnan(values[-1])):
        return [float("nan")] * len(q)
    return [_interpolate(values, (n - 1) * p / 100) for p in q]


def _pool(tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = []
    for tensor in tensors:
        read = readable(tensor.detach())
        if read is None:
            continue
        values, implied = read
        values = values if values.dtype is torch.float64 else values.float()
        parts.append(flatten(values))
        if implied:
            parts.append(values.new_zeros(implied))
    return parts


def _sorted(parts: list[Tensor]) -> NDArray[np.floating]:
    """Return a new sorted array, with NaN at the end."""
    if not parts:
        return np.zeros(0)
    if parts[0].device.type != "cpu":
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.sort().values.cpu().numpy()
    arrays = [host_array(part) for part in parts]
    values = arrays[0].copy() if len(arrays) == 1 else np.concatenate(arrays)
    values.sort()
    return values


def _interpolate(values: NDArray[np.floating], h: float) -> float:
    below = int(h)
    low = float(values[below])
    if below == h:
        return low
    high = float(values[below + 1])
    return low + (h - below) * (high - low) if low != high else low
