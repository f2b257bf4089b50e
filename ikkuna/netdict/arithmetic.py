"""Calculating with mappings of tensors, name by name."""

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError

if TYPE_CHECKING:
    from ikkuna.netdict.net_dict import NetDict

__all__ = ["Arithmetic"]


class Arithmetic:
    """The operators of a :class:`~ikkuna.netdict.net_dict.NetDict`: elementwise, and never in place."""

    def paired(self, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return both values for each name.

        Raises
        ------
        ConfigError
            If the names differ, or two values have shapes of which neither can be broadcast to the other.
        """
        mine: Mapping[str, Any] = self  # type: ignore[assignment]
        if set(mine) != set(other):
            only = [f"only here: {name}" for name in mine if name not in other]
            only += [f"only there: {name}" for name in other if name not in mine]
            raise ConfigError(f"both sides need the same names; {'; '.join(only[:6])}")
        for name in mine:
            _check_shapes(name, mine[name], other[name])
        return {name: (mine[name], other[name]) for name in mine}

    def _combine(self, other: Any, function: Callable[[Any, Any], Any]) -> "NetDict":
        from ikkuna.netdict.net_dict import NetDict

        if isinstance(other, Mapping):
            values = {name: function(a, b) for name, (a, b) in self.paired(other).items()}
        elif isinstance(other, bool | int | float) or (isinstance(other, Tensor) and other.ndim == 0):
            values = {name: function(value, other) for name, value in self.items()}  # type: ignore[attr-defined]
        else:
            return NotImplemented  # type: ignore[no-any-return]  # so that Python asks the other operand
        return NetDict(values, copy=False)

    def __add__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.sub)

    def __rsub__(self, other: Any) -> "NetDict":
        return self._combine(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.mul)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "NetDict":
        return self._combine(other, _divide)

    def __rtruediv__(self, other: Any) -> "NetDict":
        return self._combine(other, lambda a, b: _divide(b, a))

    def __pow__(self, other: Any) -> "NetDict":
        return self._combine(other, operator.pow)

    def __neg__(self) -> "NetDict":
        return self._combine(-1, operator.mul)

    def __abs__(self) -> "NetDict":
        return self.abs()

    def abs(self) -> "NetDict":
        """Return the magnitudes."""
        return self._combine(0, lambda a, _: abs(a))

    def sqrt(self) -> "NetDict":
        """Return the roots."""
        return self._combine(0, lambda a, _: a.sqrt() if isinstance(a, Tensor) else _float(torch.tensor(a).sqrt()))

    def sign(self) -> "NetDict":
        """Return -1, 0 or 1 for every element."""
        return self._combine(0, lambda a, _: a.sign() if isinstance(a, Tensor) else (a > 0) - (a < 0))

    def clip(self, min: float | None = None, max: float | None = None) -> "NetDict":
        """Return every element moved into the range."""
        return self._combine(0, lambda a, _: _like(a, torch.clamp(torch.as_tensor(a), min, max)))


def _divide(a: Any, b: Any) -> Any:
    """Divide as floating point does: numbers by zero too."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a / b
    return _float(torch.tensor(a, dtype=torch.float64) / b)


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
