r"""Statistics of tensors on a device without float64, as precise as those in float64, with float32 arithmetic.

Each sum is a few numbers in float32, see `exact_sums`, which the host adds in float64.
The elements of a chunk of :math:`n \le 2^{18}` are scaled by a power of two, :math:`v_i = x_i \, 2^{-s}` with :math:`|v_i| < 1`;
their sums :math:`\sum v_i`, :math:`\sum |v_i|` and :math:`\sum v_i^2` are exact to :math:`n 2^{-37} \epsilon`, plus one rounding
of each square, with :math:`\epsilon` the relative error of a float32 sum of :math:`n` numbers in the order of the device.
The deviations :math:`d_i = v_i - c` from a rounded mean :math:`c` are scaled again, because they may be far smaller.
With :math:`\delta = \sum v_i / n - c`, which is at most a rounding of the mean, the host computes

.. math::
    M_2 = \sum d_i^2 - n \delta^2, \quad
    M_3 = \sum d_i^3 - 3 \delta \sum d_i^2 + 2 n \delta^3, \quad
    M_4 = \sum d_i^4 - 4 \delta \sum d_i^3 + 6 \delta^2 \sum d_i^2 - 3 n \delta^4.

The subtraction :math:`v_i - c` is exact if the offset is large (Sterbenz 1974), else it rounds once.
So a deviation has a relative error of at most :math:`2^{-24}`, and sums of its powers :math:`p` one of at most :math:`2 p \, 2^{-24}`.

A chunk takes about 140 launches and 32 MiB.
"""

import math

import torch
from torch import Tensor

from ikkuna.numerics.statistics.table import COLUMN, EMPTY, Values, repeat_rows

__all__ = ["CHUNK", "decode_exact", "exact_sums", "measure_in_float32", "split_weight", "sum_of"]

CHUNK = 1 << 18
"""The most elements that are measured together."""

_GROUP = 4096
_BITS = 12  # of each part of a number; sums of _GROUP such integers are exact in float32
_PARTS = 3
_SUMS = 2 * _PARTS + 1
_HEAD = 11  # numbers before the sums


def exact_sums(terms: Tensor) -> Tensor:
    r"""Return the sums of numbers of magnitude 1 at most, as a few numbers in float32.

    Each term is :math:`t = \sum_{i=1}^{3} p_i 2^{-12 i} + r` with integers :math:`|p_i| \le 2^{12}` and :math:`|r| \le 2^{-37}`.
    The sum of 4,096 integers :math:`p_i` is an integer of at most 24 bits, so it is exact in float32 in any order, and so is
    the sum of its upper and of its lower half over at most 4,096 such groups.  Only the sum of the remainders is rounded.

    Parameters
    ----------
    terms : Tensor
        ``(quantity, element)``, float32, at most :math:`2^{24}` elements.

    Returns
    -------
    Tensor
        ``(quantity, 7)``, float32: for each i the upper and the lower half of the sum of :math:`p_i`, and the sum of remainders.

    Examples
    --------
    >>> terms = torch.tensor([[1.0, 2.0**-30, -1.0]])
    >>> sum_of(exact_sums(terms)[0].tolist()) == 2.0**-30
    True
    """
    count, n = terms.shape
    size = min(n, _GROUP)
    rest = torch.nn.functional.pad(terms, (0, -n % size)).view(count, -1, size)
    found: list[Tensor] = []
    for i in range(1, _PARTS + 1):
        unit = 2.0 ** (_BITS * i)
        part = torch.round(rest * unit)
        rest = rest - part * (1 / unit)
        of_groups = part.sum(-1)
        upper = torch.round(of_groups * 2.0**-_BITS)
        found += (upper.sum(-1), (of_groups - upper * 2.0**_BITS).sum(-1))
    found.append(rest.sum((-1, -2)))
    return torch.stack(found, -1)


def sum_of(parts: list[float]) -> float:
    """Return the sum that the numbers of `exact_sums` stand for."""
    halves = zip(parts[::2], parts[1::2], strict=False)
    whole = sum((upper * 2.0**_BITS + lower) * 2.0 ** (-_BITS * i) for i, (upper, lower) in enumerate(halves, 1))
    return whole + parts[-1]


def measure_in_float32(flat: Tensor, fields: frozenset[str]) -> Tensor:
    """Return the numbers from which `decode_exact` computes the row of a one-dimensional tensor of at most 2**18 elements."""
    x = flat.float()
    nan, finite = torch.isnan(x), torch.isfinite(x)
    clean = torch.where(finite, x, 0.0)
    k = finite.sum(dtype=torch.float32)
    zero = torch.zeros_like(k)
    v, power = _scaled(clean)
    sums = exact_sums(torch.stack((v, v.abs(), v * v)))
    center = deviation_power = zero
    powers = torch.zeros_like(sums)
    if "m2" in fields:
        first = (sums[0, 0] * 2.0**_BITS + sums[0, 1]) * 2.0**-_BITS
        second = (sums[0, 2] * 2.0**_BITS + sums[0, 3]) * 2.0 ** (-2 * _BITS)
        center = (first + second) / k.clamp(min=1)
        d, deviation_power = _scaled(torch.where(finite, v - center, 0.0))
        square = d * d
        powers = exact_sums(torch.stack((square, square * d, square * square)))
    known = torch.where(nan, torch.inf, x).amin(), torch.where(nan, -torch.inf, x).amax()
    within = torch.where(finite, x, torch.inf).amin(), torch.where(finite, x, -torch.inf).amax()
    counts = nan.sum(dtype=torch.float32), k, (x == 0).sum(dtype=torch.float32)
    head = torch.stack((*counts, *known, *within, power, deviation_power, center, zero))
    return torch.cat((head, sums.flatten(), powers.flatten()))


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x * 2**(p - 129)``, which is smaller than 1 in magnitude, and p."""
    exponent = x.abs().amax().view(torch.int32) >> 23
    power = (255 - exponent).clamp(max=254)
    return x * (power << 23).view(torch.float32) * 0.25, power.float()


def split_weight(weight: Tensor) -> Tensor:
    """Return a number as two numbers in float32 whose sum it is.

    Examples
    --------
    >>> split_weight(torch.tensor(2**24 + 1)).tolist()
    [16777216.0, 1.0]
    """
    high = weight.float()
    low = torch.zeros_like(high) if weight.is_floating_point() else (weight - high.long()).float()
    return torch.stack((high, low))


def decode_exact(values: Values, n: int, times: float, fields: frozenset[str]) -> Values:
    """Return the row of `n` elements, each of which counts `times` times the weight after the numbers of the chunk.

    Examples
    --------
    >>> fields = frozenset(("n", "nans", "infs", "mean", "m2", "sumsq"))
    >>> x = torch.tensor([1e-25, 3e-25])
    >>> numbers = torch.cat((measure_in_float32(x, fields), split_weight(torch.tensor(1))))
    >>> row = decode_exact(numbers.double().numpy(), 2, 1, fields)
    >>> [float(f"{row[COLUMN[name]]:.6g}") for name in ("mean", "m2", "sumsq")]
    [2e-25, 2e-50, 1e-49]
    """
    nans, k, zeros, low, high, finite_low, finite_high, power, deviation_power, center = values[: _HEAD - 1].tolist()
    sums = values[_HEAD:-2].reshape(-1, _SUMS).tolist()
    total, magnitudes, squares, d2, d3, d4 = map(sum_of, sums)
    unit = math.ldexp(1.0, round(129 - power))  # of v
    row = EMPTY.copy()
    found = {"n": n, "nans": nans, "infs": n - k - nans, "zeros": zeros, "l1": magnitudes * unit}
    found["sumsq"] = squares * unit * unit
    found["mean"] = total / max(k, 1) * unit
    if "m2" in fields and k:
        delta, scale = total / k - center, math.ldexp(1.0, round(129 - deviation_power))
        d2, d3, d4 = d2 * scale**2, d3 * scale**3, d4 * scale**4
        found["m2"] = max(d2 - k * delta**2, 0.0) * unit**2
        found["m3"] = (d3 - 3 * delta * d2 + 2 * k * delta**3) * unit**3
        found["m4"] = max(d4 - 4 * delta * d3 + 6 * delta**2 * d2 - 3 * k * delta**4, 0.0) * unit**4
    found |= {"finite_min": finite_low, "finite_max": finite_high}
    found |= {"min": math.nan if nans else low, "max": math.nan if nans else high}
    for name, value in found.items():
        if name in fields:
            row[COLUMN[name]] = value
    return repeat_rows(row, times * float(values[-2] + values[-1]))
