"""Norms and inner products over several tensors, computed in chunks and accumulated in float64."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.netdict.description import record_of
from ikkuna.numerics.elements import CHUNK, flatten, readable
from ikkuna.numerics.float64 import as_float64

__all__ = ["inner_product", "power_norm"]

_MEASURED = {
    0: (("zeros", "nans"), "l0_norm"),
    1: (("l1",), "l1_norm"),
    2: (("sumsq",), "l2_norm"),
    math.inf: (("min", "max", "nans"), "linf_norm"),
}


def power_norm(tensors: Sequence[Tensor], p: float) -> float:
    r"""Return :math:`(\sum |x_i|^p)^{1/p}` over all elements of `tensors`; 0 for no elements, NaN if one is not finite.

    Examples
    --------
    >>> power_norm([torch.tensor([3.0, 4.0])], 2), power_norm([torch.tensor([3.0, 0.0])], 0)
    (5.0, 1.0)
    """
    if math.isnan(p) or -math.inf < p < 0:
        raise ConfigError(f"the order of a norm must be positive, 0, inf or -inf, got {p}")
    if not sum(tensor.numel() for tensor in tensors):
        return 0.0
    if p in (0, 1, 2, math.inf):
        fields, norm = _MEASURED[p]
        return float(getattr(record_of(tensors, fields), norm))
    if p == -math.inf:
        return min(float(chunk.abs().min()) for tensor in tensors for chunk in _chunks(tensor))
    total = math.fsum(float(chunk.abs().pow(p).sum()) for tensor in tensors for chunk in _chunks(tensor))
    return float(total ** (1 / p))


def inner_product(a: Any, b: Any) -> float:
    """Return the sum of elementwise products of two tensors (or numbers) that can be broadcast to one shape."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return float(a * b)
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    left, right = (torch.as_tensor(x).expand(shape).reshape(-1) for x in (a, b))
    count = left.numel() // CHUNK + 1
    pairs = zip(left.chunk(count), right.chunk(count), strict=True)
    return math.fsum(float(torch.dot(as_float64(x), as_float64(y))) for x, y in pairs)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    read = readable(tensor)
    if read is not None:
        flat = flatten(read[0])
        for chunk in flat.chunk(flat.numel() // CHUNK + 1):
            yield as_float64(chunk)
