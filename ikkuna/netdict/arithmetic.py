"""Elementwise arithmetic on mappings of tensors, name by name."""

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError

__all__ = ["Arithmetic"]


class Arithmetic(Mapping[str, Any]):
    """Elementwise operators of a mapping of tensors; none works in place."""

    @abstractmethod
    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a new object of this class with `values`, which are not copied."""

    def paired(self, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return both values for each name.

        Raises
        ------
        ConfigError
            If the names differ, or if two shapes cannot be broadcast to one of them.
        """
        if set(self) != set(other):
            only = [f"only on the left: {name}" for name in self if name not in other]
            only += [f"only on the right: {name}" for name in other if name not in self]
            raise ConfigError(f"both sides need the same names; {'; '.join(only[:6])}")
        for name in self:
            _check_shapes(name, self[name], other[name])
        return {name: (self[name], other[name]) for name in self}

    def _combine(self, other: Any, function: Callable[[Any, Any], Any]) -> Self:
        if isinstance(other, Mapping):
            values = {name: function(a, b) for name, (a, b) in self.paired(other).items()}
        elif isinstance(other, bool | int | float) or (isinstance(other, Tensor) and other.ndim == 0):
            values = {name: function(value, other) for name, value in self.items()}
        else:
            return NotImplemented  # type: ignore[no-any-return]  # Python then tries the operator of the other operand
        return self.with_values(values)

    def __add__(self, other: Any) -> Self:
        return self._combine(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        return self._combine(other, operator.sub)

    def __rsub__(self, other: Any) -> Self:
        return self._combine(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Self:
        return self._combine(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Self:
        return self._combine(other, _divide)

    def __rtruediv__(self, other: Any) -> Self:
        return self._combine(other, lambda a, b: _divide(b, a))

    def __pow__(self, other: Any) -> Self:
        return self._combine(other, operator.pow)

    def __neg__(self) -> Self:
        return self._combine(-1, operator.mul)

    def __abs__(self) -> Self:
        return self.abs()

    def abs(self) -> Self:
        """Return the magnitudes."""
        return self._combine(0, lambda a, _: abs(a))

    def sqrt(self) -> Self:
        """Return the square roots."""
        return self._combine(
            0, lambda a, _: a.sqrt() if isinstance(a, Tensor) else _float(torch.tensor(a, device="cpu").sqrt())
        )

    def sign(self) -> Self:
        """Return -1, 0 or 1 for every element."""
        return self._combine(0, lambda a, _: a.sign() if isinstance(a, Tensor) else (a > 0) - (a < 0))

    def clip(self, min: float | None = None, max: float | None = None) -> Self:
        """Return every element limited to the range from `min` to `max`."""
        return self._combine(0, lambda a, _: _like(a, torch.clamp(torch.as_tensor(a), min, max)))


def _divide(a: Any, b: Any) -> Any:
    """Return the quotient of floating-point division, also for a number divided by zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a / b
    return _float(torch.tensor(a, dtype=torch.float64, device="cpu") / b)


def _float(value: Tensor) -> float:
    return float(value.item())


def _like(value: Any, result: Tensor) -> Any:
    return result if isinstance(value, Tensor) else _float(result)


def _check_shapes(name: str, a: Any, b: Any) -> None:
    left, right = getattr(a, "shape", torch.Size()), getattr(b, "shape", torch.Size())
    if left == right:
        return
    try:
        joint = np.broadcast_shapes(left, right)
    except ValueError:
        joint = None
    if joint not in (tuple(left), tuple(right)):
        raise ConfigError(f"{name!r} has shape {tuple(left)} on the left and {tuple(right)} on the right")
