r"""Rows that are measured precisely on a device, whatever the dtype and the magnitude of the numbers.

Each chunk is read twice: the mean first, then the powers of the deviations from it.  So no digits are lost to a large offset.
A chunk takes about 30 launches and 48 MiB.

On a device without float64, each sum is a few numbers in float32, see `exact_sums`, which the host adds in float64.
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
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, has_float64, on_device, pieces, readable
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, EMPTY, Values, merge_rows, repeat_rows, row_of

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


_CHUNK = 1 << 20  # bounds each temporary tensor to 8 MiB


def measure_exactly(flat: Tensor, fields: frozenset[str]) -> Tensor:
    """Return the row ``(columns,)`` of a one-dimensional tensor that has elements, on its device.

    Columns that are not in `fields` are those of no elements.

    Examples
    --------
    >>> row = measure_exactly(torch.tensor([1.0, 3.0]), frozenset(("n", "nans", "infs", "mean", "m2")))
    >>> [row[COLUMNS.index(name)].item() for name in ("n", "mean", "m2")]
    [2.0, 2.0, 2.0]
    """
    rows = [_measure(chunk, fields) for chunk in flat.split(_CHUNK)]
    return merge_rows(torch.stack(rows)) if len(rows) > 1 else rows[0]


def _measure(x: Tensor, fields: frozenset[str]) -> Tensor:
    x = x.double()
    nan, finite = torch.isnan(x), torch.isfinite(x)
    found = {"n": x.new_full((), x.numel()), "nans": _total(nan)}
    k = _total(finite)
    found["infs"] = found["n"] - found["nans"] - k
    clean = torch.where(finite, x, 0.0)
    if "zeros" in fields:
        found["zeros"] = _total(x == 0)
    if "l1" in fields:
        found["l1"] = clean.abs().sum()
    if "sumsq" in fields:
        found["sumsq"] = (clean * clean).sum()
    if "mean" in fields:
        found["mean"] = clean.sum() / k.clamp(min=1)
    if "m2" in fields:
        deviation = torch.where(finite, x - found["mean"], 0.0)
        power = deviation * deviation
        found["m2"] = power.sum()
        if "m3" in fields:
            found["m3"] = (power * deviation).sum()
        if "m4" in fields:
            found["m4"] = (power * power).sum()
    if "min" in fields or "max" in fields:
        found["min"], found["max"] = torch.aminmax(x)
    if "finite_min" in fields or "finite_max" in fields:
        found["finite_min"] = torch.where(finite, x, torch.inf).amin()
        found["finite_max"] = torch.where(finite, x, -torch.inf).amax()
    empty = dict(zip(COLUMNS, EMPTY.tolist(), strict=True))
    missing = {name: x.new_full((), empty[name]) for name in COLUMNS if name not in found}
    return torch.stack([found.get(name, missing.get(name)) for name in COLUMNS])  # type: ignore[misc]


def _total(mask: Tensor) -> Tensor:
    return mask.sum(dtype=torch.float64)


_MOST = 256  # rows that wait to be merged
_PIECE = 1 << 20  # elements that are copied or converted together; as many in float64 take 8 MiB


class ExactRow(NamedTuple):
    """A row that was measured precisely.

    Parameters
    ----------
    row : int
        Its number.
    fields : frozenset of str
        What was measured.
    values : Tensor
        On the device: ``(columns,)`` in float64, or numbers in float32, see `decode_exact`.
    n : int, optional
        Number of elements if the numbers are in float32.
    times : float
        How often each of them counts.
    """

    row: int
    fields: frozenset[str]
    values: Tensor
    n: int | None = None
    times: float = 1

    def decode(self, values: Values) -> Values:
        """Return the row ``(columns,)`` with these values, which have been copied to the host."""
        return values if self.n is None else decode_exact(values, self.n, self.times, self.fields)


class ExactRows:
    """The rows of a step that were measured precisely.

    A device without float64 gives several numbers in float32 for each sum.

    Attributes
    ----------
    found : list of ExactRow
        The rows; several may have the same number.

    Examples
    --------
    >>> rows = ExactRows()
    >>> rows.add(7, torch.tensor([3.0, 4.0]), frozenset(("n", "sumsq")), weight=2)
    >>> [(found.row, found.values[5].item()) for found in rows.found]
    [(7, 50.0)]
    """

    def __init__(self) -> None:
        self.found: list[ExactRow] = []

    def add(self, row: int, x: Tensor, fields: frozenset[str], weight: float | Tensor = 1) -> None:
        """Measure a tensor that has numbers, each of which counts `weight` times."""
        for part in _parts(x):
            read = readable(part)
            assert read is not None, "has_numbers() has seen numbers"
            stored, implied_zeros = flatten(read[0]), read[1]
            if has_float64(x.device):
                self._add_in_float64(row, stored, implied_zeros, fields, weight)
            else:
                self._add_in_float32(row, stored, implied_zeros, fields, weight)

    def _add_in_float64(
        self, row: int, stored: Tensor, implied_zeros: int, fields: frozenset[str], weight: float | Tensor
    ) -> None:
        rows = [measure_exactly(stored, fields)] if stored.numel() else []
        if implied_zeros:
            rows.append(on_device(torch.from_numpy(row_of(0.0, implied_zeros)), stored.device))
        if isinstance(weight, Tensor) or weight != 1:
            rows = [repeat_rows(values, weight) for values in rows]
        self.found += (ExactRow(row, fields, values) for values in rows)
        if len(self.found) > _MOST:
            self.found = _merged(self.found)

    def _add_in_float32(
        self, row: int, stored: Tensor, implied_zeros: int, fields: frozenset[str], weight: float | Tensor
    ) -> None:
        factor = split_weight(weight if isinstance(weight, Tensor) else stored.new_ones(()))
        times = 1.0 if isinstance(weight, Tensor) else float(weight)
        for chunk in stored.split(CHUNK) if stored.numel() else ():
            numbers = torch.cat((measure_in_float32(chunk, fields), factor))
            self.found.append(ExactRow(row, fields, numbers, chunk.numel(), times))
        if implied_zeros:
            numbers = torch.cat((measure_in_float32(stored.new_zeros(1), fields), factor))
            self.found.append(ExactRow(row, fields, numbers, 1, times * implied_zeros))

    def merge(self, other: "ExactRows") -> None:
        """Add the rows of `other`, and leave it as it is."""
        self.found = self.found + other.found

    def drop(self, rows: Collection[int]) -> None:
        """Forget some rows."""
        self.found = [found for found in self.found if found.row not in rows]

    def take(self) -> list[ExactRow]:
        """Return all rows, and forget them."""
        found, self.found = self.found, []
        return found


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor in parts, if they have to be copied or converted."""
    for part in pieces(x, _PIECE):
        is_wide = part.is_floating_point() and part.element_size() > 1
        yield from (part,) if is_wide or part.ndim != 1 or part.layout is not torch.strided else part.split(_PIECE)


def _merged(exact: Sequence[ExactRow]) -> list[ExactRow]:
    """Merge the values of each row and set of fields, in one operation for all that have equally many."""
    by_row: dict[tuple[int, frozenset[str]], list[Tensor]] = {}
    for found in exact:
        by_row.setdefault((found.row, found.fields), []).append(found.values)
    by_count: dict[int, list[tuple[int, frozenset[str]]]] = {}
    for key, values in by_row.items():
        by_count.setdefault(len(values), []).append(key)
    merged: list[ExactRow] = []
    for count, keys in by_count.items():
        stacked = torch.stack([values for key in keys for values in by_row[key]])
        rows = merge_rows(stacked.unflatten(0, (len(keys), count)).transpose(0, 1)) if count > 1 else stacked
        merged += [ExactRow(*key, values) for key, values in zip(keys, islice(rows, len(keys)), strict=True)]
    return merged
