"""How far the gradients of one weight agree with each other."""

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

__all__ = ["GradientSNRSubscriber"]


@dataclass(slots=True)
class _Moments:
    """Mean and sum of squared deviations of each element so far in a window."""

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

    Mean and variance of each element are over a window of gradients in a row: over the micro-batches of a step if the window is
    their number, else over steps as well, between which the weights should hardly move.

    Takes ``weight_micro_gradients`` or another kind of which a module has one at a time;
    publishes ``{kind}_snr``, without unit, at least 0, at the end of each window; of several in a step the last counts,
    and of several ranks one: each has micro-batches of its own.
    Elements that never change are left out; a tensor of nothing else, or one with a NaN or Inf in the window, has NaN.
    Of pure noise the mean is 1 / window and more, the median about half of that.
    After a change of shape, dtype or device a window begins again.  It keeps two copies of every tensor it takes.

    Look for: a fall over training, as gradients of different samples cease to agree; a layer far below the others learns noise.

    Parameters
    ----------
    kind : str
        What to look at.
    window : int
        Number of gradients, at least 2.
    reduction : {'median', 'mean'}
        Over elements; the ratio has heavy tails, so the median is steadier.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        For a number out of range, another reduction, or a kind that a module can have several of at a time.

    References
    ----------
    J. Liu et al., Understanding why neural networks generalize well through GSNR of parameters, 2020.

    Examples
    --------
    >>> GradientSNRSubscriber(window=8).publishes
    ('weight_micro_gradients_snr',)
    """

    merge = "last"

    def __init__(
        self, kind: str = "weight_micro_gradients", *, window: int = 16, reduction: str = "median", **options: Any
    ) -> None:
        if kind not in (known := (*MICRO_KINDS, *PARAMETER_KINDS)):
            raise ConfigError(f"GradientSNRSubscriber takes one of {', '.join(known)}; got {kind!r}")
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise ConfigError(f"GradientSNRSubscriber needs a window >= 2, got {window!r}")
        if reduction not in ("mean", "median"):
            raise ConfigError(f"GradientSNRSubscriber reduces by 'mean' or 'median', got {reduction!r}")
        options.setdefault("publishes", f"{kind}_snr")
        super().__init__(kind, **options)
        self.window = window
        self.reduction = reduction
        self._moments: dict[str | None, _Moments] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Take in a gradient; return the ratio if it is the last of a window."""
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
            zeros = torch.zeros(x.shape, dtype=dtype, device=x.device)  # a step that is made again begins again
            known = self._moments[message.series_name] = _Moments(message.stamp, zeros, zeros.clone())
        return known

    def compute(self, message: ModuleMessage) -> None:
        """Emit the ratio."""
        self.emit(message, message.data[0])
