"""Which devices compute in float64."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_float64", "has_float64", "widest_float"]


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; ``mps`` and some GPUs of Intel do not.

    The first call for a device multiplies a number there, without waiting for the result.

    Examples
    --------
    >>> has_float64(torch.device("cpu"))
    True
    """
    if device.type in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=device).mul_(2)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return False
    return True


def widest_float(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on a device without float64.

    Examples
    --------
    >>> widest_float(torch.ones(2))
    torch.float64
    """
    return torch.float64 if has_float64(x.device) else torch.float32


def as_float64(values: Any) -> Tensor:
    """Return data as a detached float64 tensor, on its own device if that has float64, else on the host.

    Examples
    --------
    >>> as_float64(torch.ones(2)).dtype, as_float64([1, 2]).tolist()
    (torch.float64, [1.0, 2.0])
    """
    if isinstance(values, Tensor):
        x = values.detach()
        return (x if has_float64(x.device) else x.cpu()).double()
    return torch.from_numpy(np.array(values, dtype=np.float64))
