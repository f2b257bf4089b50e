"""The error of rounding a tensor to a narrow format after scaling it by its largest magnitude."""

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.precision import FORMATS

__all__ = ["QUANTIZED_FORMATS", "largest_number", "quantization_errors", "quantize"]

_LARGEST_INT8 = 127
QUANTIZED_FORMATS = ("e4m3", "e5m2", "int8")
"""``float8_e4m3fn``, ``float8_e5m2``, and integers from -127 to 127."""


def quantize(x: Tensor, name: str) -> Tensor:
    """Round each element to the nearest number of a format, ties to even, without changing the dtype of `x`.

    Parameters
    ----------
    x : Tensor
        Of a floating dtype; elements beyond the largest number of the format become this number.
    name : {'e4m3', 'e5m2', 'int8'}
        The format.

    Raises
    ------
    ConfigError
        If the format is unknown.

    Examples
    --------
    >>> quantize(torch.tensor([0.3, 1.06, 500.0]), "e4m3").tolist()
    [0.3125, 1.0, 448.0]
    """
    largest = largest_number(name)
    if name == "int8":
        return x.round().clamp(-largest, largest)
    x = x.clamp(-largest, largest)
    form = FORMATS[name]
    # frexp returns a mantissa below 1, so its exponent is one more than that of the format
    exponent = (torch.frexp(x).exponent - 1).clamp(min=form.min_exponent) - form.mantissa
    step = torch.ldexp(torch.ones_like(x), exponent)
    return (x / step).round() * step


def largest_number(name: str) -> float:
    """Return the largest number of a format.

    Examples
    --------
    >>> largest_number("e5m2")
    57344.0
    """
    if name not in QUANTIZED_FORMATS:
        raise ConfigError(f"quantization needs one of the formats {', '.join(QUANTIZED_FORMATS)}, got {name!r}")
    return float(_LARGEST_INT8) if name == "int8" else FORMATS[name].max


def quantization_errors(x: Tensor, name: str, channel_axis: int = 0) -> Tensor:
    r"""Sum the squared errors of rounding `x` with one scale, and with one for each channel.

    The function does not wait for the device.
    With :math:`a = \max |x|` of the tensor or of the channel and the largest number *M* of the format, the rounded element is
    :math:`\frac a M Q(\frac M a x_i)`.

    Parameters
    ----------
    x : Tensor
        ``(…)``, with an axis of channels unless it is a number.
    name : {'e4m3', 'e5m2', 'int8'}
        The format.
    channel_axis : int
        The axis of channels.

    Returns
    -------
    Tensor
        ``(3,)``, float64: the squared error with one scale, the squared error with a scale for each channel, and :math:`\sum_i x_i^2`.
        The square root of the ratio is the relative error.  A NaN or Inf makes all sums NaN.

    Raises
    ------
    ConfigError
        If the format is unknown, or `x` has no such axis.

    References
    ----------
    P. Micikevicius et al., FP8 formats for deep learning, 2022.

    Examples
    --------
    >>> one, each, total = quantization_errors(torch.tensor([[100.0, 127.0], [0.001, 0.002]]), "int8")
    >>> one > each, total.round().item()
    (tensor(True), 26129.0)
    """
    largest = largest_number(name)
    if x.ndim and not -x.ndim <= channel_axis < x.ndim:
        raise ConfigError(f"quantization_errors needs a channel_axis of {tuple(x.shape)}, got {channel_axis!r}")
    if not x.numel():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    x = x.detach()
    x = x if x.dtype is torch.float64 else x.float()
    rows = x.movedim(channel_axis, 0).flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
    of_channels = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)
    errors = [_squared_error(rows, amax, name, largest) for amax in (of_channels.amax(), of_channels)]
    return torch.stack([*errors, rows.double().square().sum()])


def _squared_error(rows: Tensor, amax: Tensor, name: str, largest: float) -> Tensor:
    scale = torch.where(amax > 0, amax, 1.0) / largest
    return (quantize(rows / scale, name) * scale - rows).double().square().sum()
