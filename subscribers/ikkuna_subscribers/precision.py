"""The loss of a tensor in a narrower number format."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Message
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.precision import FORMATS, count_losses, shares
from ikkuna.numerics.statistics.float_code import SAMPLE, sample

__all__ = ["PrecisionSubscriber"]


class PrecisionSubscriber(PlotSubscriber):
    """The shares of a tensor :math:`s x` that a float format would round to 0, store with fewer bits, or be unable to store.

    Of the finite elements that are not 0, *underflow* is the share that rounds to 0
    and *subnormal* the share below the smallest normal number; of the finite elements, *overflow* is the share beyond the largest number.
    Elements are classified as a cast with rounding to nearest, ties to even, would do; a saturating cast counts as overflow.

    Takes any kind with a tensor; publishes ``{kind}_{format}_underflow``, ``{kind}_{format}_subnormal`` and ``{kind}_{format}_overflow``,
    all between 0 and 1, NaN without an element to divide by; an empty tensor publishes nothing.
    Over several calls and micro-batches they are those of all elements together.

    Look for: gradients with more than 5 to 10 % underflow need a loss scale; with any overflow, a smaller one.

    Parameters
    ----------
    kind : str
        The kind to measure.
    format : {'fp16', 'bf16', 'e4m3', 'e5m2'}
        The number format.
    scale : float
        :math:`s > 0`, the factor applied before storing.
    exact : bool
        Whether all elements are counted, which costs about ten sums over them.
        By default a random sample of 65,536 is counted, which can miss a rare overflow.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the format is unknown, or the scale is not positive and finite.

    References
    ----------
    P. Micikevicius et al., FP8 formats for deep learning, 2022.

    Examples
    --------
    >>> PrecisionSubscriber("weight_gradients", "e5m2").publishes
    ('weight_gradients_e5m2_underflow', 'weight_gradients_e5m2_subnormal', 'weight_gradients_e5m2_overflow')
    """

    state = ("_generators",)

    def __init__(
        self, kind: str, format: str = "fp16", *, scale: float = 1.0, exact: bool = False, **options: Any
    ) -> None:
        if format not in FORMATS:
            raise ConfigError(f"PrecisionSubscriber needs one of the formats {', '.join(FORMATS)}, got {format!r}")
        if not 0 < scale < math.inf:
            raise ConfigError(f"PrecisionSubscriber needs a scale above 0, got {scale!r}")
        name_results(options, *(f"{kind}_{format}_{loss}" for loss in ("underflow", "subnormal", "overflow")))
        super().__init__(kind, **options)
        self.format = format
        self.scale = scale
        self.exact = exact
        self._generators: dict[torch.device, torch.Generator] = {}

    def measure(self, message: Any) -> Tensor | None:
        """Return the counts of :func:`~ikkuna.numerics.precision.count_losses`; those of a sample are scaled to all elements."""
        x: Tensor = message.data
        if readable(x) is None or not x.numel():
            return None
        if self.exact or x.numel() <= SAMPLE or x.layout is not torch.strided:
            return count_losses(x, self.format, self.scale).double()
        generator = self._generators.get(x.device)
        if generator is None:
            generator = self._generators[x.device] = torch.Generator(x.device).manual_seed(0)
        counts = count_losses(sample(x, generator), self.format, self.scale)
        return counts.double() * (x.numel() / SAMPLE)

    def compute(self, message: Message) -> None:
        """Emit the three shares."""
        found = shares(torch.from_numpy(message.data))
        for kind, value in zip(self.publishes, (found.underflow, found.subnormal, found.overflow), strict=True):
            self.emit(message, value, kind)
