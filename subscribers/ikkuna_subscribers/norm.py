"""The size of a tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.elements import flatten, readable

__all__ = ["NormSubscriber"]

_NORMS = {0: "l0_norm", 1: "l1_norm", 2: "l2_norm", math.inf: "linf_norm"}
_FIELDS = {0: ("zeros",), 1: ("l1",), 2: ("sumsq",), math.inf: ("min", "max")}


class NormSubscriber(PlotSubscriber):
    r"""The p-norm of all elements of a tensor, :math:`\left(\sum_i |x_i|^p\right)^{1/p}`.

    For a matrix and p = 2 this is the Frobenius norm, not the spectral one.
    p = 0 counts the elements that are not 0; p = ∞ is the largest magnitude.

    Takes any kind with a tensor, and other subscribers' results; publishes ``{kind}_norm{p}``, in the unit of x.
    Over several calls and micro-batches it is the norm of all elements together.
    An empty tensor has norm 0 (for p = ∞: NaN); data with a NaN or Inf has norm NaN, unless `finite_only`.

    Look for: gradients that shrink or grow from layer to layer, and jumps of one layer over time.

    Parameters
    ----------
    kind : str
        What to look at.
    p : float
        Order of the norm, at least 0.
    finite_only : bool
        Leave out elements that are NaN or infinite.
    **options
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

    derived = True

    def __init__(self, kind: str, p: float = 2, *, finite_only: bool = False, **options: Any) -> None:
        if isinstance(p, bool) or not isinstance(p, int | float) or not p >= 0:
            raise ConfigError(f"NormSubscriber needs an order p >= 0, got {p!r}")
        options.setdefault("publishes", f"{kind}_norm{p:g}")
        super().__init__(kind, **options)
        self.p = p
        self.finite_only = finite_only
        self.fields = _FIELDS.get(p, ())

    @property
    def measures(self) -> bool:
        """Only an order that no shared statistic gives is measured by itself."""
        return not self.fields

    def measure(self, message: Any) -> Tensor | None:
        r"""Return :math:`\\sum |x_i|^p`, in float64."""
        read = readable(message.data)
        if read is None:
            return None
        x = flatten(read[0]).double()
        if self.finite_only:
            x = torch.where(torch.isfinite(x), x, 0)
        total = x.abs().pow(self.p).sum()
        return torch.where(torch.isfinite(x).all(), total, math.nan).reshape(1)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the norm."""
        if not self.fields:
            self.emit(
                message, abs(message.data) if isinstance(message.data, float) else message.data[0] ** (1 / self.p)
            )
            return
        self.emit(message, getattr(message.record, _NORMS[self.p]))
