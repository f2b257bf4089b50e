"""The learning rates of an optimizer."""

from collections.abc import Iterable
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["add_rates", "has_no_rate"]


def add_rates(optimizer: Optimizer, rates: dict[str, Any]) -> None:
    """Store the learning rates in `rates` before a scheduler changes them; a rate on an accelerator stays there."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        name = str(group.get("name", len(rates)))
        rates[_unused(name, rates) if name in rates else name] = (
            rate.detach().clone() if isinstance(rate, Tensor) else rate
        )


def has_no_rate(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are known to be 0, without waiting for an accelerator."""
    return all(_is_zero(group.get("lr")) for group in optimizer.param_groups)


def _is_zero(rate: Any) -> bool:
    return rate == 0 if isinstance(rate, int | float) else isinstance(rate, Tensor) and rate.is_cpu and not rate


def _unused(name: str, taken: Iterable[str]) -> str:
    """Return `name` with the first number behind it that makes it differ from those `taken`."""
    numbered = (f"{name}_{i}" for i in count(1))
    return next(free for free in numbered if free not in taken)
