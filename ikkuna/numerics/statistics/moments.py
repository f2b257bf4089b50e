r"""The merge of central moments, and the state of running moments.

With :math:`k_r` elements of mean :math:`m_r` in part :math:`r`, :math:`m = \sum k_r m_r / \sum k_r` and :math:`d_r = m_r - m`,

.. math::
    M_2 = \sum M_{2r} + k_r d_r^2, \quad
    M_3 = \sum M_{3r} + 3 d_r M_{2r} + k_r d_r^3, \quad
    M_4 = \sum M_{4r} + 4 d_r M_{3r} + 6 d_r^2 M_{2r} + k_r d_r^4,

which is Chan, Golub & LeVeque (1979) and Pébay (2008) for any number of parts.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CHUNK", "STATE", "combine", "merge_moments", "observe", "parts"]

A = TypeVar("A", NDArray[np.float64], Tensor)

CHUNK = 1 << 20
STATE = ("total", "squares", "center", "m2", "low", "high", "count", "nans", "above", "below")
"""The state of running moments.  Of the finite observations: sum of weights and of squared weights, mean, sum of squared deviations,
extrema and number.  Then the numbers of observations that are NaN, infinite, and negative infinite."""


def merge_moments(k: A, mean: A, m2: A | None = None, m3: A | None = None, m4: A | None = None) -> tuple[A, ...]:
    """Return the mean, and as many of the second to fourth moments as are given, of all parts together.

    Parameters
    ----------
    k : array or Tensor
        ``(parts, ...)``, how many elements each part has, or their total weight.  Other numbers of a part without elements are ignored.
    mean, m2, m3, m4 : array or Tensor
        ``(parts, ...)``, means and sums of powers of the deviations from them, in float64.

    Returns
    -------
    tuple of arrays or Tensors
        ``(...)``; 0 for no elements.

    Examples
    --------
    >>> merge_moments(np.array([2.0, 1.0]), np.array([1.0, 4.0]), np.array([2.0, 0.0]))     # of 0 and 2, and of 4
    (np.float64(2.0), np.float64(8.0))
    """
    xp: Any = torch if isinstance(k, Tensor) else np
    some, total = k > 0, k.sum(0)
    share = k / xp.where(total > 0, total, 1.0)
    about = (share * xp.where(some, mean, 0.0)).sum(0)
    center = about + (share * xp.where(some, mean - about, 0.0)).sum(0)  # the second sum rounds a small number
    d = xp.where(some, mean - center, 0.0)
    merged = [center]
    if m2 is not None:
        m2 = xp.where(some, m2, 0.0)
        merged.append((m2 + k * d * d).sum(0))
    if m2 is not None and m3 is not None:
        m3 = xp.where(some, m3, 0.0)
        merged.append((m3 + 3 * d * m2 + k * d * d * d).sum(0))
    if m2 is not None and m3 is not None and m4 is not None:
        m4 = xp.where(some, m4, 0.0)
        merged.append((m4 + 4 * d * m3 + 6 * d * d * m2 + k * d * d * d * d).sum(0))
    return tuple(merged)


def parts(x: Tensor, w: Tensor | None, per_element: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield ``(values, weights)`` with the observations along the first axis."""
    if per_element:
        yield x.unsqueeze(0), None if w is None else w.expand(x.shape).unsqueeze(0)
    elif x.numel():
        count = -(-x.numel() // CHUNK)
        values = x.reshape(-1).chunk(count)
        yield from zip(
            values, [None] * len(values) if w is None else w.expand(x.shape).reshape(-1).chunk(count), strict=True
        )


def observe(x: Tensor, w: Tensor | None) -> dict[str, Tensor]:
    """Return the state of the observations `x`: (observation, ...)."""
    finite = torch.isfinite(x)
    w = torch.ones_like(x) if w is None else w
    w = torch.where(finite, w, 0.0)
    total = w.sum(0)
    values = torch.where(finite, x, 0.0)
    center = torch.where(total > 0, (w * values).sum(0) / total, 0.0)
    deviation = torch.where(finite, x - center, 0.0)
    return {
        "total": total,
        "squares": (w * w).sum(0),
        "center": center,
        "m2": (w * deviation * deviation).sum(0),
        "low": torch.where(finite, x, torch.inf).amin(0),
        "high": torch.where(finite, x, -torch.inf).amax(0),
        "count": finite.sum(0, dtype=torch.float64),
        "nans": torch.isnan(x).sum(0, dtype=torch.float64),
        "above": torch.isposinf(x).sum(0, dtype=torch.float64),
        "below": torch.isneginf(x).sum(0, dtype=torch.float64),
    }


def combine(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the observations of `a` and `b` together, on the device of `a`."""
    b = {key: value.to(a[key].device) for key, value in b.items()}
    merged = {key: a[key] + b[key] for key in STATE}
    total, center, m2 = (torch.stack((a[key], b[key])) for key in ("total", "center", "m2"))
    merged["center"], merged["m2"] = merge_moments(total, center, m2)
    merged["low"], merged["high"] = torch.minimum(a["low"], b["low"]), torch.maximum(a["high"], b["high"])
    return merged
