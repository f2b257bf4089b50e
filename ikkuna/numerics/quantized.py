"""The numbers that quantised and other special tensors stand for."""

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["dequantized", "is_special"]

_PLAIN = (Tensor, nn.Parameter)


def is_special(x: Tensor) -> bool:
    """Return whether the stored elements of `x` may be other numbers than those that it stands for.

    Examples
    --------
    >>> codes = torch.ones(2, dtype=torch.uint8)
    >>> is_special(codes), is_special(nn.Parameter(codes, requires_grad=False))
    (False, True)
    """
    return type(x) is not Tensor and (type(x) is not nn.Parameter or not _has_fractions(x))


def _has_fractions(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def dequantized(x: Tensor) -> Tensor | None:
    """Return the numbers that `x` stands for as a plain tensor; ``None`` if `x` does not offer them.

    A subclass offers them by a method ``dequantize`` of its own, as those of torchao do; weights of bitsandbytes in 4 bits are
    unpacked by bitsandbytes.  Elements of other integer parameters are codes of an unknown format.

    Examples
    --------
    >>> dequantized(torch.ones(2, dtype=torch.uint8))
    tensor([1, 1], dtype=torch.uint8)
    >>> dequantized(nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)) is None
    True
    """
    offered = x.dequantize if x.is_quantized or type(x).dequantize is not Tensor.dequantize else _unpacking(x)
    if offered is None:
        return x if _has_fractions(x) or type(x) is Tensor else None
    with torch.no_grad():
        found = offered()
    return found if type(found) in _PLAIN and _has_fractions(found) else None


def _unpacking(x: Tensor) -> Callable[[], Tensor] | None:
    """Return the function that unpacks a weight of bitsandbytes."""
    state = getattr(x, "quant_state", None) if type(x).__name__ == "Params4bit" else None
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if state is None or functional is None:
        return None
    return lambda: cast(Tensor, functional.dequantize_4bit(x.data, state))
