"""Count, mean and squared deviation of observations, as a state that merges: the kernels of running moments."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["CHUNK", "STATE", "as_float64", "combine", "observe", "parts"]

CHUNK = 1 << 20
STATE = ("total", "squares", "center", "m2", "low", "high", "count", "nans", "above", "below")
"""Sum of weights, of squared weights, mean, sum of squared deviations, extrema and number of the finite observations;
number of those that were NaN, infinite, or negative infinite."""


def as_float64(values: Any) -> Tensor:
    """Return any data as a detached float64 tensor, on its own device where that knows float64."""
    if isinstance(values, Tensor):
        x = values.detach()
        return (x.cpu() if x.device.type == "mps" else x).double()
    return torch.from_numpy(np.array(values, dtype=np.float64))


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
    """Return the state of the observations of `a` and `b` together, after Chan, Golub & LeVeque (1979)."""
    b = {key: value.to(a[key].device) for key, value in b.items()}
    merged = {key: a[key] + b[key] for key in STATE}
    total = merged["total"]
    share = torch.where(total > 0, b["total"] / total, 0.0)
    difference = b["center"] - a["center"]
    # Where one side is empty its mean is a placeholder, and the share is exactly 0 or 1.
    merged["center"] = torch.where(share == 1, b["center"], a["center"] + difference * share)
    merged["m2"] = a["m2"] + b["m2"] + difference * difference * a["total"] * share
    merged["low"], merged["high"] = torch.minimum(a["low"], b["low"]), torch.maximum(a["high"], b["high"])
    return merged
