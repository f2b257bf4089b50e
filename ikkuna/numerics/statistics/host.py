"""Statistics of tensors on the host: rows of one table, filled by the C++ kernels, or by numpy without a compiler."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.numerics.elements import CHUNK, flatten, has_numbers, pieces, readable, without_repeats
from ikkuna.numerics.statistics.eager import measure_eagerly
from ikkuna.numerics.statistics.float_code import add_codes, merge_codes
from ikkuna.numerics.statistics.native import Library, library
from ikkuna.numerics.statistics.record import HISTOGRAMS, Record, record_of
from ikkuna.numerics.statistics.table import COLUMNS, EMPTY, Values, empty_rows, merge_rows, repeat_rows, row_of

__all__ = ["HostStatistics", "measure"]

_COUNTED = HISTOGRAMS | {"n"}
_ROW_BYTES = 8 * len(COLUMNS)
_FIRST_CAPACITY = 64


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
    >>> from ikkuna.numerics.statistics import closure
    >>> statistics, fields = HostStatistics(), closure(["sumsq", "max"])
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
        self.address(int(rows.max()))
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
            What to measure, see :func:`~ikkuna.numerics.statistics.closure`; only that is computed.
        weight : float or Tensor
            How many elements of a mean each element stands for; histograms do not depend on it.
        generator : torch.Generator, optional
            Source of randomness of ``sampled_codes``; by default a new one with seed 0.

        Returns
        -------
        bool
            ``False`` for a tensor without numbers (meta, fake, nested), which is not added.
        """
        kernels = self.kernels
        if kernels is not None and weight == 1 and not fields <= _COUNTED and kernels.accepts(x):
            kernels.add(x, fields, self.address(row))
        elif not has_numbers(x):
            return False
        elif type(x) is Tensor and x.numel() == 1 and x.is_floating_point():  # a loss, which is a mean of many
            self._merge(row, (row_of(x.item(), float(weight)),), 1)
        elif x.numel():
            few, times = without_repeats(x)
            for part in pieces(few):
                if (read := readable(part)) is None:
                    return False
                self._add_flat(row, *read, fields, float(weight) * times)
        if not fields.isdisjoint(HISTOGRAMS):
            add_codes(self.codes.setdefault(row, {}), x, fields, generator, native=self.kernels is not None)
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

    def add_difference(self, row: int, x: Tensor, y: Tensor, fields: frozenset[str]) -> bool:
        """Add the statistics of ``x - y``, computed in at least float32, to a row; return whether these tensors have numbers."""
        if self.kernels is not None and fields.isdisjoint(HISTOGRAMS) and self.kernels.accepts_difference(x, y):
            self.kernels.add_difference(x, y, fields, self.address(row))
            return True
        return self.add(row, x.to(torch.promote_types(x.dtype, torch.float32)) - y, fields)

    def record(self, row: int, fields: frozenset[str]) -> Record:
        """Return the `fields` of a row."""
        record = record_of(self.values[row] if row < len(self.values) else EMPTY, fields)
        for name, counts in self.codes.get(row, {}).items():
            setattr(record, name, counts.numpy())
        return record

    def merge(self, other: "HostStatistics") -> None:
        """Add the rows of `other`, and leave it as it is."""
        rows = np.flatnonzero(other.values[:, 0])
        if len(rows):
            self.address(int(rows[-1]))
            values = other.values[rows]
            known = self.values[rows, 0] > 0
            if known.any():
                with np.errstate(all="ignore"):
                    values[known] = merge_rows(np.stack([self.values[rows[known]], values[known]]))
            self.values[rows] = values
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
    >>> from ikkuna.numerics.statistics import closure
    >>> record = measure(torch.tensor([3.0, -4.0, 0.0]), closure(["sumsq", "zeros", "min"]))
    >>> record.l2_norm, record.sparsity, record.min
    (5.0, 0.3333333333333333, -4.0)
    """
    statistics = HostStatistics(native)
    return statistics.record(0, fields) if statistics.add(0, x, fields, generator=generator) else None
