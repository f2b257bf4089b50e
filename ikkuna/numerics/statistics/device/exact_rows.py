"""Rows that are measured precisely on a device, whatever the dtype and the magnitude of the elements."""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, on_device, pieces, readable
from ikkuna.numerics.float64 import has_float64
from ikkuna.numerics.statistics.device.exact import measure_exactly
from ikkuna.numerics.statistics.device.exact_float32 import CHUNK, decode_exact, measure_in_float32, split_weight
from ikkuna.numerics.statistics.table import Values, merge_rows, repeat_rows, row_of

__all__ = ["ExactRow", "ExactRows"]

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
