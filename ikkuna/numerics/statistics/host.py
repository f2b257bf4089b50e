"""Statistics of tensors on the host: rows of one table, filled by the C++ kernels, or by numpy without a compiler.

numpy reads a tensor in chunks of 131,072 elements, which stay in cache for several reductions.
Sums are dot products of pieces of 1,024 elements, too short for float32 to drift and for BLAS to start threads.  Pieces add in float64.
One ``torch.linalg.vector_norm`` over a large float32 tensor on the CPU is wrong by 0.4 % at 50 M elements; this is right to 1e-6.

Moments come from sums of powers about 0 if the mean is small beside the deviations, as for weights and gradients, otherwise about the mean.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import CHUNK, flatten, has_numbers, host_array, pieces, readable, without_repeats
from ikkuna.numerics.statistics.float_code import (
    WORTH_SAMPLING,
    add_codes,
    add_counts,
    draw_seed,
    half_size,
    merge_codes,
)
from ikkuna.numerics.statistics.native import Library, library
from ikkuna.numerics.statistics.native.kernels import COUNTED, flags_of
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, needed_fields, record_of
from ikkuna.numerics.statistics.table import COLUMNS, EMPTY, Values, empty_rows, merge_rows, repeat_rows, row_of

_LONG, _PIECE = 1 << 20, 1 << 10
_WIDE = frozenset((torch.float32, torch.float64))
_SQUARES = needed_fields(("sumsq",))
_MOMENTS = frozenset(("mean", "m2", "m3", "m4"))
_EXTREMA = frozenset(("min", "max", "finite_min", "finite_max"))

_Array = NDArray[Any]
_Found = dict[str, float]

_ONES: dict[Any, _Array] = {np.dtype(name): np.ones(_PIECE, name) for name in ("float32", "float64")}
_EMPTY: _Found = dict(zip(COLUMNS, EMPTY.tolist(), strict=True))


def measure_eagerly(flat: Tensor, fields: frozenset[str]) -> Values:
    """Return the table row of a one-dimensional tensor; columns that are not in `fields` are arbitrary.

    Examples
    --------
    >>> row = measure_eagerly(torch.tensor([3.0, -4.0, 1.0]), needed_fields(["m3", "min", "l1"]))
    >>> [row[COLUMNS.index(name)].item() for name in ("mean", "m2", "m3", "min", "l1")]
    [0.0, 26.0, -36.0, -4.0, 8.0]
    """
    if not flat.numel():
        return EMPTY.copy()
    size = _LONG if fields == _SQUARES else CHUNK  # a single reduction needs no cache
    chunks = flat.split(size) if flat.numel() > size else (flat,)
    with np.errstate(all="ignore"):
        rows = np.array([list(_measure_eagerly(_as_array(chunk), fields).values()) for chunk in chunks])
        return merge_rows(rows) if len(rows) > 1 else rows[0]


def _as_array(x: Tensor) -> _Array:
    if x.dtype not in _WIDE:
        x = x.float()
    return host_array(x)


def _measure_eagerly(x: _Array, fields: frozenset[str]) -> _Found:
    found = _sums(x, fields)
    if found is None and x.dtype == np.float32:
        found = _sums(x.astype(np.float64), fields)
    return _of_finite(x, fields) if found is None else found


def _sums(x: _Array, fields: frozenset[str], is_finite: bool = False) -> _Found | None:
    """Return the statistics computed in the precision of `x`; ``None`` if powers exceed it or elements may not be finite."""
    found = _EMPTY | {"n": float(len(x))}
    if not fields.isdisjoint(_EXTREMA):
        found["min"], found["max"] = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
        found["finite_min"], found["finite_max"] = found["min"], found["max"]
    if "nans" not in fields:
        return found
    squares = _dots(x, x)
    if not (is_finite or _fits(x, squares)):
        return None
    if fields & _MOMENTS and not _add_moments(found, x, squares, fields):
        return None
    if "sumsq" in fields:
        found["sumsq"] = squares
    if "l1" in fields:
        found["l1"] = _sum(np.absolute(x))
    if "zeros" in fields:
        found["zeros"] = float(len(x) - int(np.count_nonzero(np.not_equal(x, 0))))
    return found


def _fits(x: _Array, squares: float) -> bool:
    """Return whether the precision is enough for squares: they are finite, and do not vanish."""
    return math.isfinite(squares) and (x.dtype == np.float64 or squares > 1e-28 * len(x) or not x.any())


def _add_moments(found: _Found, x: _Array, squares: float, fields: frozenset[str]) -> bool:
    r"""Add the mean and moments, from sums about 0 or about the mean; return whether the precision was enough.

    With :math:`S_k = \sum_i (x_i - p)^k` about a pivot and :math:`\delta = S_1 / n` the mean is :math:`p + \delta`,
    :math:`m_2 = S_2 - n \delta^2`, :math:`m_3 = S_3 - 3 \delta S_2 + 2 n \delta^3` and
    :math:`m_4 = S_4 - 4 \delta S_3 + 6 \delta^2 S_2 - 3 n \delta^4`.
    If :math:`\delta^2` is small beside :math:`S_2 / n`, almost nothing cancels.
    """
    n, is_high = len(x), "m3" in fields
    pivot, s1, s2, s3, s4 = 0.0, _sum(x), squares, 0.0, 0.0
    if "m2" in fields:
        if n * (s1 / n) * (s1 / n) > (0.01 if is_high else 0.5) * squares or not math.isfinite(squares):
            mean = x.dtype.type(s1 / n)
            pivot, x = float(mean), x - mean
            s1, s2 = _sum(x), _dots(x, x)
        if is_high:
            powers = x * x
            s3, s4 = _dots(x, powers), _dots(powers, powers)
            if x.dtype == np.float32 and s2 and not (1e-14 * n < s2 and math.isfinite(s4)):
                return False
    d = s1 / n
    dd = d * d  # a product overflows to infinity, where ``d**2`` raises
    found["mean"] = pivot + d
    if "m2" in fields:
        found["m2"] = max(s2 - n * dd, 0.0)
    if is_high:
        found["m3"] = s3 - 3 * d * s2 + 2 * n * dd * d
    if "m4" in fields:
        found["m4"] = s4 - 4 * d * s3 + 6 * dd * s2 - 3 * n * dd * dd
    return True


def _sum(x: _Array) -> float:
    return _dots(x, _ONES[x.dtype])


def _dots(x: _Array, y: _Array) -> float:
    """Return the sum of products, in pieces; a shorter `y` is used for each piece."""
    rest = len(x) % _PIECE
    whole, is_short = len(x) - rest, len(y) < len(x)
    total = float(np.dot(x[whole:], y[:rest] if is_short else y[whole : whole + rest])) if rest else 0.0
    if whole:
        right = y if is_short else y[:whole]
        total += float(np.matmul(x[:whole].reshape(-1, 1, _PIECE), right.reshape(-1, _PIECE, 1)).sum(dtype=np.float64))
    return total


def _of_finite(x: _Array, fields: frozenset[str]) -> _Found:
    """Return the statistics of the finite elements, computed in float64, and the counts of the others."""
    finite = x[np.isfinite(x)].astype(np.float64)
    found = (_sums(finite, fields, is_finite=True) if len(finite) else None) or _EMPTY.copy()
    found["n"] = float(len(x))
    found["nans"] = float(np.count_nonzero(np.isnan(x)))
    found["infs"] = float(len(x) - len(finite)) - found["nans"]
    if "min" in fields or "max" in fields:
        found["min"], found["max"] = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
    return found


_COUNTED = HISTOGRAMS | {"n"}
_ROW_BYTES = 8 * len(COLUMNS)
_FIRST_CAPACITY = 64
_CODES = 2 * half_size(3)
_ALL = 1 << 62


@cache
def counted_field(fields: frozenset[str]) -> str | None:
    """Return the histogram of `fields` that a kernel counts where it measures others of `fields`; ``None`` if there is none."""
    found = None if fields <= _COUNTED else sorted(fields & HISTOGRAMS)[-1:]
    return found[0] if found else None


class ListCounts:
    """The histograms of a list of tensors, counted by the kernel that measures the list.

    Parameters
    ----------
    fields : sequence of str or None
        The histogram of each tensor, if there is one.
    sizes : sequence of int
        The numbers of elements.
    rows : array of int64
        The numbers of the rows.
    """

    def __init__(self, fields: Sequence[str | None], sizes: Sequence[int], rows: NDArray[np.int64]) -> None:
        self._fields = [(i, int(rows[i]), name) for i, name in enumerate(fields) if name is not None]
        self._sampled = [i for i, _, name in self._fields if name == "sampled_codes" and sizes[i] > WORTH_SAMPLING]
        self._table = np.zeros((len(sizes), 2), np.int64)
        self._open: list[tuple[int, int, str]] = []
        self._counts = torch.empty(0, device="cpu")

    def begin(self, tensors: Sequence[object], generator: torch.Generator) -> NDArray[np.int64] | None:
        """Reserve memory and draw seeds for tensors that are not ``None``; return the table of the kernel, if there are any."""
        self._open = [each for each in self._fields if tensors[each[0]] is not None]
        if not self._open:
            return None
        self._counts = torch.empty((len(self._open), _CODES), dtype=torch.int64, device="cpu")
        self._table[:] = 0, -1
        for number, (i, *_) in enumerate(self._open):
            self._table[i, 0] = self._counts.data_ptr() + 8 * _CODES * number
        for i in self._sampled:
            if self._table[i, 0]:
                self._table[i, 1] = draw_seed(generator)
        return self._table

    def end(self, codes: dict[int, dict[str, Tensor]], left: Sequence[int]) -> None:
        """Add the counts to the histograms of the rows, apart from those of tensors that the kernel has `left`."""
        for (i, row, name), counts in zip(self._open, self._counts, strict=True):
            if i not in left:
                add_counts(codes.setdefault(row, {}), name, counts)
        self._open, self._counts = [], self._counts[:0].clone()


class HostStatistics:
    """A table with a row of statistics for each number that a caller gives, and histograms beside it.

    The table grows as needed.  `DeviceStatistics` has the same methods.

    Parameters
    ----------
    native : bool
        Whether to use the C++ kernels if they are available, rather than numpy; results agree to 1e-6.

    Attributes
    ----------
    values : array
        ``(capacity, columns)``, float64; see `ikkuna.numerics.statistics.table`.
    location : array
        ``(1,)``, int64, the address of the first row, which changes when the table grows.
    codes : dict
        Histograms by row and field.

    Examples
    --------
    >>> from ikkuna.numerics.statistics import needed_fields
    >>> statistics, fields = HostStatistics(), needed_fields(["sumsq", "max"])
    >>> for x in (torch.tensor([3.0]), torch.tensor([-4.0])):
    ...     added = statistics.add(0, x, fields)
    >>> statistics.record(0, fields).l2_norm, statistics.record(0, fields).max
    (5.0, 3.0)
    """

    def __init__(self, native: bool = True) -> None:
        self.kernels = library() if native else None
        self.codes: dict[int, dict[str, Tensor]] = {}
        self.location: NDArray[np.int64] = np.zeros(1, np.int64)
        self._outgrown: list[Values] = []
        self._use(empty_rows(_FIRST_CAPACITY))

    def _use(self, values: Values) -> None:
        self.values = values
        self._address = self.location[0] = values.ctypes.data

    def reserve(self, count: int) -> None:
        """Make room for a number of rows."""
        if count > len(self.values):
            self.address(count - 1)

    def address(self, row: int) -> int:
        """Return the address of a row, valid until `take`."""
        if row >= len(self.values):
            self._outgrown.append(self.values)  # a kernel in another thread may still write to it
            self._use(np.concatenate([self.values, empty_rows(max(row + 1 - len(self.values), len(self.values)))]))
        return self._address + row * _ROW_BYTES

    def addresses(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the addresses of several rows, at least one, valid until `take`."""
        if (last := int(np.maximum.reduce(rows))) >= len(self.values):
            self.address(last)
        return self._address + rows * _ROW_BYTES

    def add(
        self,
        row: int,
        x: Tensor,
        fields: frozenset[str],
        weight: float | Tensor = 1,
        generator: torch.Generator | None = None,
    ) -> bool:
        """Add the statistics of the elements of `x` to a row.

        Parameters
        ----------
        row : int
            Number of the row.
        x : Tensor
            Any shape, dtype and layout, detached.
        fields : frozenset of str
            What to measure, see :func:`~ikkuna.numerics.statistics.needed_fields`; only that is computed.
        weight : float or Tensor
            How many elements of a mean each element stands for; histograms do not depend on it.
        generator : torch.Generator, optional
            Source of randomness of ``sampled_codes``; by default a new one with seed 0.

        Returns
        -------
        bool
            ``False`` for a tensor without numbers (meta, fake, nested), which is not added.
        """
        if type(weight) is int and weight == 1 and not fields <= _COUNTED and self.try_add(row, x, fields, generator):
            return True
        if not has_numbers(x):
            return False
        if x.numel():
            few, times = without_repeats(x)
            weight = float(weight) * times
            is_one_number = type(few) is Tensor and few.numel() == 1 and few.is_floating_point()
            if is_one_number:  # a loss, which is a mean of many, or the gradient of a sum
                self._merge(row, (row_of(few.item(), weight),), 1)
            for part in () if is_one_number else pieces(few):
                if (read := readable(part)) is None:
                    return False
                self._add_flat(row, *read, fields, weight)
        if not fields.isdisjoint(HISTOGRAMS):
            add_codes(self.codes.setdefault(row, {}), x, fields, generator, native=self.kernels is not None)
        return True

    def try_add(self, row: int, x: Tensor, fields: frozenset[str], generator: torch.Generator | None = None) -> bool:
        """Add a tensor with kernels and few checks; it may be attached to a graph.  Return whether that was done."""
        kernels = self.kernels
        if kernels is None or fields.isdisjoint(HISTOGRAMS):
            return kernels is not None and kernels.try_add(x, fields, self.address(row))
        if kernels.reader is None or (name := counted_field(fields)) is None:
            return False
        counts = torch.empty(_CODES, dtype=torch.int64, device="cpu")
        most = WORTH_SAMPLING if name == "sampled_codes" else _ALL
        done = kernels.reader.add(x, flags_of(fields), self.address(row), counts.data_ptr(), most)
        if not done:
            return False
        if not done & COUNTED:
            kernels.sampled_codes(x, 3, counts, draw_seed(generator))
        add_counts(known := self.codes.setdefault(row, {}), name, counts)
        if len(fields & HISTOGRAMS) > 1:
            add_codes(known, x, fields - {name}, generator)
        return True

    def _add_flat(self, row: int, x: Tensor, implied_zeros: int, fields: frozenset[str], weight: float) -> None:
        flat = flatten(x)
        if flat.numel() <= CHUNK:
            flat = flat.contiguous()
        kernels = self.kernels if self.kernels is not None and self.kernels.accepts(flat) else None
        if kernels is not None and not implied_zeros and weight == 1 and not fields <= _COUNTED:
            kernels.add(flat, fields, self.address(row))
            return
        measured = _measure(flat, fields, kernels)
        self._merge(row, (measured, row_of(0.0, implied_zeros)) if implied_zeros else (measured,), weight)

    def _merge(self, row: int, parts: Sequence[Values], weight: float) -> None:
        self.address(row)
        if len(parts) == 1 and weight == 1 and not self.values[row, 0]:
            self.values[row] = parts[0]
            return
        with np.errstate(all="ignore"):
            self.values[row] = merge_rows(np.stack([self.values[row], *(repeat_rows(part, weight) for part in parts)]))

    def record(self, row: int, fields: frozenset[str]) -> Record:
        """Return the `fields` of a row."""
        record = record_of(self.values[row] if row < len(self.values) else EMPTY, fields)
        for name, counts in self.codes.get(row, {}).items():
            setattr(record, name, counts.numpy())
        return record

    def merge(self, other: "HostStatistics") -> None:
        """Add the rows of `other`, and leave it as it is."""
        given = other.values[:, 0] > 0
        if np.count_nonzero(given):
            self.reserve(len(given))
            values, known = self.values[: len(given)], given & (self.values[: len(given), 0] > 0)
            merged: Values | None = None
            if np.count_nonzero(known):
                with np.errstate(all="ignore"):
                    merged = merge_rows(np.stack([values[known], other.values[known]]))
            np.copyto(values, other.values, where=given[:, None])
            if merged is not None:
                values[known] = merged
        if other.codes:
            merge_codes(self.codes, other.codes)

    def clear(self, rows: list[int] | None = None) -> None:
        """Empty some rows, or all."""
        if rows is None:
            self.values[:] = EMPTY
            self.codes, self._outgrown = {}, []
            return
        self.values[[row for row in rows if row < len(self.values)]] = EMPTY
        for row in rows:
            self.codes.pop(row, None)

    def take(self, count: int) -> tuple[Values, dict[int, dict[str, Tensor]]]:
        """Return a copy of the first `count` rows, and the histograms, and empty the table."""
        if count > len(self.values):
            self.reserve(count)
        values, codes = self.values[:count].copy(), self.codes
        self.values[:] = EMPTY
        self.codes, self._outgrown = {}, []
        return values, codes


def _measure(stored: Tensor, fields: frozenset[str], kernels: Library | None) -> Values:
    if fields <= _COUNTED:
        return row_of(math.nan, stored.numel())
    return measure_eagerly(stored, fields) if kernels is None else kernels.measure(stored, fields)


def measure(
    x: Tensor, fields: frozenset[str], generator: torch.Generator | None = None, *, native: bool = True
) -> Record | None:
    """Return the `fields` of the elements of `x`, a tensor on the host; parameters are those of `HostStatistics.add`.

    Examples
    --------
    >>> from ikkuna.numerics.statistics import needed_fields
    >>> record = measure(torch.tensor([3.0, -4.0, 0.0]), needed_fields(["sumsq", "zeros", "min"]))
    >>> record.l2_norm, record.sparsity, record.min
    (5.0, 0.3333333333333333, -4.0)
    """
    statistics = HostStatistics(native)
    return statistics.record(0, fields) if statistics.add(0, x, fields, generator=generator) else None
