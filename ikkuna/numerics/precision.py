"""The losses of a tensor in a narrower number format.

A cast would not show all losses: PyTorch's cast to e4m3 saturates, so values around 1,000 would not count as overflow.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.numerics.elements import CHUNK, flatten, readable, without_repeats


@dataclass(frozen=True)
class FloatFormat:
    """A float format; rounding is to nearest, ties to even.

    Parameters
    ----------
    mantissa : int
        The number of stored mantissa bits.
    min_exponent : int
        The exponent of the smallest normal number.
    max : float
        The largest finite number.
    """

    mantissa: int
    min_exponent: int
    max: float

    @property
    def min_normal(self) -> float:
        """Smallest normal number."""
        return 2.0**self.min_exponent

    @property
    def flush(self) -> float:
        """Largest magnitude that rounds to zero: half the smallest subnormal number."""
        return 2.0 ** (self.min_exponent - self.mantissa - 1)

    @property
    def overflow(self) -> float:
        """Smallest magnitude that rounds beyond `max`."""
        ulp = 2.0 ** (math.frexp(self.max)[1] - 1 - self.mantissa)
        tie = self.max + ulp / 2
        tie_goes_up = int(self.max / ulp) % 2 == 1
        return tie if tie_goes_up else math.nextafter(tie, math.inf)


FORMATS = {
    "fp16": FloatFormat(10, -14, 65504.0),
    "bf16": FloatFormat(7, -126, (2 - 2.0**-7) * 2.0**127),
    "e4m3": FloatFormat(3, -6, 448.0),
    "e5m2": FloatFormat(2, -14, 57344.0),
}
"""float16, bfloat16 and the two fp8 formats (``float8_e4m3fn``, ``float8_e5m2``)."""


@dataclass(frozen=True)
class PrecisionShares:
    """Shares in [0, 1]; NaN without an element to divide by.

    Parameters
    ----------
    underflow : float
        The share of finite nonzero elements that become 0.  More than 5 to 10 % of a gradient is too much.
    subnormal : float
        The share of finite nonzero elements that are below the smallest normal number and lose bits.
    overflow : float
        The share of finite elements beyond the largest number.
    """

    underflow: float
    subnormal: float
    overflow: float


def _format(name: str) -> FloatFormat:
    if name not in FORMATS:
        raise ConfigError(f"unknown float format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def count_losses(x: Tensor, name: str, scale: float = 1.0) -> Tensor:
    r"""Count the elements of :math:`s x` that the format `name` cannot represent, without waiting for the device.

    Parameters
    ----------
    x : Tensor
        Any shape, dtype and layout.
    name : str
        A key of :data:`FORMATS`.
    scale : float
        :math:`s > 0`, such as a loss scale.  The thresholds are divided by it, so a power of two keeps them exact.

    Returns
    -------
    Tensor
        ``(5,)``, int64: flushed to zero, subnormal, overflowing, finite nonzero, finite.
        Results can be summed; see :func:`shares`.  NaN and infinite elements are not counted.

    Raises
    ------
    ConfigError
        If the format is unknown.

    Notes
    -----
    It costs about ten sums over :math:`x` on a CPU.

    Examples
    --------
    >>> count_losses(torch.tensor([0.0, 1e-8, 1e-6, 1.0, 65520.0, float("inf")]), "fp16").tolist()
    [1, 1, 1, 4, 5]
    """
    form = _format(name)
    x, times = without_repeats(x.detach())
    if times > 1:
        return count_losses(x, name, scale) * times
    read = readable(x)
    if read is None:
        return torch.zeros(5, dtype=torch.int64, device="cpu")
    values, implied_zeros = read
    flat = flatten(values)
    chunks = torch.split(flat, CHUNK) if flat.device.type == "cpu" and flat.numel() else (flat,)
    counts = torch.stack([_count_chunk(chunk, form, scale) for chunk in chunks]).sum(0)
    counts[-1] += implied_zeros
    return counts


def _count_chunk(x: Tensor, form: FloatFormat, scale: float) -> Tensor:
    magnitudes = x.abs()
    magnitudes = magnitudes if magnitudes.dtype is torch.float64 else magnitudes.float()
    above_flush = math.nextafter(form.flush / scale, math.inf)
    thresholds = (above_flush, form.min_normal / scale, form.overflow / scale)
    kept, normal, overflow = (_representable(threshold, magnitudes.dtype) for threshold in thresholds)
    a: Any = magnitudes.numpy() if magnitudes.is_cpu else magnitudes  # numpy compares ten times faster than torch
    masks = (a < math.inf, a == 0, a < kept, a < normal, a < overflow)
    finite, zeros, rounded_to_zero, below_normal, held = map(_count, masks)
    flushed, nonzero = rounded_to_zero - zeros, finite - zeros
    return torch.stack([flushed, below_normal - rounded_to_zero, finite - held, nonzero, finite])


def _count(mask: Any) -> Tensor:
    return torch.count_nonzero(mask) if isinstance(mask, Tensor) else torch.tensor(np.count_nonzero(mask), device="cpu")


def _representable(threshold: float, dtype: torch.dtype) -> float:
    """Return the smallest number of `dtype` that is at least `threshold`; a comparison would round it and could hit a tie."""
    if dtype is torch.float64:
        return threshold
    if threshold > torch.finfo(torch.float32).max:
        return math.inf
    rounded = np.float32(threshold)
    return float(rounded if float(rounded) >= threshold else np.nextafter(rounded, np.float32(np.inf)))


def shares(counts: Tensor) -> PrecisionShares:
    """Return the shares for `counts`, a result of :func:`count_losses` or a sum of such results.

    Examples
    --------
    >>> shares(count_losses(torch.tensor([0.0, 1e-8, 1e-6, 1.0, 65520.0]), "fp16"))
    PrecisionShares(underflow=0.25, subnormal=0.25, overflow=0.2)
    """
    flushed, subnormal, overflow, nonzero, finite = (float(c) for c in counts)
    return PrecisionShares(_share(flushed, nonzero), _share(subnormal, nonzero), _share(overflow, finite))


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


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
    unit = torch.where(amax > 0, amax, 1.0)
    # a factor between the numbers of the format and those of `rows` would underflow if these are subnormal
    rows = rows / unit
    return ((quantize(rows * largest, name) / largest - rows).double() * unit).square().sum()
