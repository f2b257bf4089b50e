"""The signal-to-noise ratio of the gradients of a weight."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, Stamp
from ikkuna.export.messages.kinds import MICRO_KINDS, PARAMETER_KINDS
from ikkuna.export.subscriber import PlotSubscriber
from ikkuna.numerics.agreement import gradient_snr
from ikkuna.numerics.elements import readable
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["GradientSNRSubscriber"]


@dataclass(slots=True)
class _Moments:
    """The mean and the sum of squared deviations of each element in a window so far."""

    stamp: Stamp
    mean: Tensor
    m2: Tensor
    count: int = 0

    def add(self, x: Tensor) -> None:
        self.count += 1
        deviation = x - self.mean
        self.mean.add_(deviation / self.count)
        self.m2.addcmul_(deviation, x - self.mean)


class GradientSNRSubscriber(PlotSubscriber):
    r"""The signal-to-noise ratio of a gradient, :math:`\bar g_j^2 / \operatorname{var}(g_j)`, averaged over its elements j.

    Mean and variance of each element are taken over a window of successive gradients.  If `window` is the number of micro-batches,
    this is one step; otherwise it covers several steps, between which the weights should change little.

    Takes ``weight_micro_gradients`` or another kind with one tensor per parameter at a time;
    publishes ``{kind}_snr``, without unit, at least 0, at the end of each window.
    If a step has several windows, the last one counts; of several ranks one counts, because each has its own micro-batches.
    Elements that never change are left out; if none is left, or if the window has a NaN or Inf, the value is NaN.
    For pure noise the mean is 1 / window or more, the median about half of that.
    After a change of shape, dtype or device a new window begins.  It keeps two copies of every tensor it takes.

    Look for: a fall over training, as the gradients of different samples cease to agree; a layer far below the others learns noise.

    Parameters
    ----------
    kind : str
        The kind to measure.
    window : int
        The number of gradients, at least 2.
    reduction : {'median', 'mean'}
        The average over elements; the ratio has heavy tails, so the median is more stable.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a number is out of range, or the reduction or the kind is not supported.

    References
    ----------
    J. Liu et al., Understanding why neural networks generalize well through GSNR of parameters, 2020.

    Examples
    --------
    >>> GradientSNRSubscriber(window=8).publishes
    ('weight_micro_gradients_snr',)
    """

    merge = "last"
    state = ("_moments",)
    state_types = (_Moments,)

    def __init__(
        self, kind: str = "weight_micro_gradients", *, window: int = 16, reduction: str = "median", **options: Any
    ) -> None:
        if kind not in (known := (*MICRO_KINDS, *PARAMETER_KINDS)):
            raise ConfigError(f"GradientSNRSubscriber needs one of the kinds {', '.join(known)}; got {kind!r}")
        require_integers("GradientSNRSubscriber", 2, window=window)
        if reduction not in ("mean", "median"):
            raise ConfigError(f"GradientSNRSubscriber needs a reduction 'mean' or 'median', got {reduction!r}")
        options.setdefault("publishes", f"{kind}_snr")
        super().__init__(kind, **options)
        self.window = window
        self.reduction = reduction
        self._moments: dict[str | None, _Moments] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Add a gradient to the window; return the ratio if it is the last one of the window."""
        if (read := readable(message.data)) is None:
            return None
        moments = self._moments_for(message, read[0])
        moments.add(read[0])
        moments.stamp = message.stamp
        if moments.count < self.window:
            return None
        del self._moments[message.series_name]
        return gradient_snr(moments.mean, moments.m2, moments.count, self.reduction).reshape(1)

    def _moments_for(self, message: ModuleMessage, x: Tensor) -> _Moments:
        known = self._moments.get(message.series_name)
        dtype = torch.promote_types(x.dtype, torch.float32)
        fits = known is not None and (known.mean.shape, known.mean.dtype, known.mean.device) == (
            x.shape,
            dtype,
            x.device,
        )
        if known is None or not fits or (known.stamp == message.stamp and known.stamp is not message.stamp):
            zeros = torch.zeros(x.shape, dtype=dtype, device=x.device)  # a repeated step starts a new window
            known = self._moments[message.series_name] = _Moments(message.stamp, zeros, zeros.clone())
        return known

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        self.emit(message, message.data[0])
