"""The norm of a tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Message
from ikkuna.export.subscriber import SharedStatisticSubscriber
from ikkuna.numerics.elements import has_numbers, pieces, readable, without_repeats
from ikkuna.numerics.statistics import Record

__all__ = ["NormSubscriber"]

_SHARED = {  # order → fields, and the property of `Record` that is the norm
    0: (("zeros",), "l0_norm"),
    1: (("l1",), "l1_norm"),
    2: (("sumsq",), "l2_norm"),
    math.inf: (("min", "max", "finite_min", "finite_max"), "linf_norm"),
}


class NormSubscriber(SharedStatisticSubscriber):
    r"""The p-norm of all elements of a tensor, :math:`\left(\sum_i |x_i|^p\right)^{1/p}`.

    For a matrix and p = 2 this is the Frobenius norm, not the spectral norm.
    p = 0 counts the elements that are not 0; p = ∞ is the largest magnitude.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_norm{p}``, in the unit of x.
    Over several calls and micro-batches it is the norm of all elements together.
    Data with a NaN or Inf has norm NaN, unless `finite_only` is set; then only p = ∞ is NaN without a finite element.
    An empty tensor publishes nothing.

    Look for: gradients that shrink or grow from layer to layer, and jumps of one layer over time.

    Parameters
    ----------
    kind : str
        The kind to measure.
    p : float
        The order of the norm, at least 0.
    finite_only : bool
        Whether NaN and infinite elements are left out.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `p` is negative or not a number.

    Examples
    --------
    >>> NormSubscriber("layer_gradients", subsample=10).publishes
    ('layer_gradients_norm2',)
    """

    accepts_finite_only = True
    derived = True

    def __init__(self, kind: str, p: float = 2, *, finite_only: bool = False, **options: Any) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 0:
            raise ConfigError(f"NormSubscriber needs an order p >= 0, got {p!r}")
        self.results = (f"norm{p:g}",)
        super().__init__(kind, finite_only=finite_only, **options)
        self.p = p
        self.fields, self._property = _SHARED.get(p, ((), ""))

    @property
    def measures(self) -> bool:
        """Whether no shared statistic gives this norm."""
        return not self.fields

    def measure(self, message: Any) -> Tensor | None:
        r"""Return :math:`\sum |x_i|^p`, in float64."""
        if not has_numbers(message.data) or not message.data.numel():
            return None
        few, times = without_repeats(message.data)
        totals = [self._sum_of_powers(read[0]) for part in pieces(few) if (read := readable(part)) is not None]
        return (sum(totals[1:], totals[0]) * times).reshape(1) if totals else None

    def _sum_of_powers(self, x: Tensor) -> Tensor:
        x = x.double().abs()
        if self.finite_only:
            x = torch.where(torch.isfinite(x), x, 0)
        return torch.where(torch.isfinite(x).all(), x.pow(self.p).sum(), math.nan)

    def values(self, record: Record) -> tuple[float]:
        """Return the norm, if it is a shared statistic."""
        return (getattr(record, self._property),)

    def values_of(self, message: Message) -> tuple[float]:
        """Return the norm of one message."""
        if self.fields:
            assert message.record is not None
            return self.values(message.record)
        if isinstance(message.data, float):  # a result of another subscriber
            return (abs(message.data),)
        return (message.data[0] ** (1 / self.p),)
