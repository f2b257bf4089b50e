"""The error of rounding a tensor to eight bits."""

import math
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.elements import readable
from ikkuna.numerics.quantization import QUANTIZED_FORMATS, quantization_errors
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["QuantizationSubscriber"]


class QuantizationSubscriber(PlotSubscriber):
    r"""The largest magnitude of a tensor, and the relative error of rounding it to eight bits.

    The error is :math:`\lVert Q(x) - x \rVert_2 / \lVert x \rVert_2`, with the rounded elements :math:`Q(x)`.
    Elements are scaled so that the largest magnitude becomes the largest number of the format, and rounded to nearest, ties to even.
    One error is that with one scale for the tensor, the other that with one scale for each channel.

    Takes any kind with a tensor; publishes ``{kind}_amax`` in the unit of the tensor, ``{kind}_{format}_error`` and
    ``{kind}_{format}_channel_error``, without unit.
    Over several calls and micro-batches the errors are those of all elements, each call with its own scales.
    A tensor of zeros has no error, and a NaN or Inf makes all values NaN; an empty tensor publishes nothing.
    By default it samples every hundredth step, because a sample costs several times as much as a step of a small network.

    Look for: about 0.03 for ``e4m3`` and 0.05 for ``e5m2``; an error with one scale far above that with channels comes from outliers.

    Parameters
    ----------
    kind : str
        The kind to measure.
    format : {'e4m3', 'e5m2', 'int8'}
        The number format.
    channel_axis : int
        The axis of channels; a tensor without it publishes nothing.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the format is unknown, or `channel_axis` is not an integer.

    Examples
    --------
    >>> QuantizationSubscriber("weights", "int8").publishes
    ('weights_amax', 'weights_int8_error', 'weights_int8_channel_error')
    """

    fields = ("min", "max")

    def __init__(self, kind: str = "weights", format: str = "e4m3", *, channel_axis: int = 0, **options: Any) -> None:
        if format not in QUANTIZED_FORMATS:
            known = ", ".join(QUANTIZED_FORMATS)
            raise ConfigError(f"QuantizationSubscriber needs one of the formats {known}, got {format!r}")
        require_integers("QuantizationSubscriber", least=-8, channel_axis=channel_axis)
        name_results(options, f"{kind}_amax", f"{kind}_{format}_error", f"{kind}_{format}_channel_error")
        options.setdefault("subsample", 100)
        super().__init__(kind, **options)
        self.format = format
        self.channel_axis = channel_axis

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the sums of :func:`~ikkuna.numerics.quantization.quantization_errors`."""
        x: Tensor = message.data
        if x.layout is not torch.strided or not x.numel() or (read := readable(x)) is None:
            return None
        if x.ndim and not -x.ndim <= self.channel_axis < x.ndim:
            return None
        return quantization_errors(read[0], self.format, self.channel_axis)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the largest magnitude and both errors."""
        record = message.record
        assert record is not None
        assert record.min is not None
        assert record.max is not None
        errors = message.data
        largest = max(abs(record.min), abs(record.max)) if math.isfinite(errors[2]) else math.nan
        relative = [math.sqrt(error / errors[2]) if errors[2] else 0.0 for error in errors[:2]]
        for kind, value in zip(self.publishes, (largest, *relative), strict=True):
            self.emit(message, value, kind)
