"""Rows that are measured precisely on a device, whatever the dtype and the magnitude of the elements."""

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ikkuna.numerics.elements import flatten, readable
from ikkuna.numerics.statistics.device.exact import measure_exactly
from ikkuna.numerics.statistics.table import merge_rows, repeat_rows, row_of

__all__ = ["ExactRow", "ExactRows"]

_MOST = 256  # rows that wait to be merged


class ExactRow(NamedTuple):
    """A row measured in float64.

    Parameters
    ----------
    row : int
        Its number.
    fields : frozenset of str
        What was measured.
    values : Tensor
        ``(columns,)``, on the device.
    """

    row: int
    fields: frozenset[str]
    values: Tensor


class ExactRows:
    """The rows of a step that were measured in float64.

    Attributes
    ----------
    found : list of ExactRow
        The rows; several may have the same number.

    Examples
    --------
    >>> rows = ExactRows()
    >>> rows.add(7, torch.tensor([3.0, 4.0]), frozenset(("n", "sumsq")), weight=2)
    >>> [(row, values[5].item()) for row, _, values in rows.found]
    [(7, 50.0)]
    """

    def __init__(self) -> None:
        self.found: list[ExactRow] = []

    def add(self, row: int, x: Tensor, fields: frozenset[str], weight: float | Tensor = 1) -> None:
        """Measure a tensor that has numbers, each of which counts `weight` times."""
        read = readable(x)
        assert read is not None, "has_numbers() has seen numbers"
        stored, implied_zeros = flatten(read[0]), read[1]
        rows = [measure_exactly(stored, fields)] if stored.numel() else []
        if implied_zeros:
            rows.append(torch.from_numpy(row_of(0.0, implied_zeros)).to(x.device, non_blocking=True))
        if isinstance(weight, Tensor) or weight != 1:
            rows = [repeat_rows(values, weight) for values in rows]
        self.found += (ExactRow(row, fields, values) for values in rows)
        if len(self.found) > _MOST:
            self.found = _merged(self.found)

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


def _merged(exact: Sequence[ExactRow]) -> list[ExactRow]:
    """Merge the values of each row and set of fields, in one operation for all that have equally many."""
    by_row: dict[tuple[int, frozenset[str]], list[Tensor]] = {}
    for row, fields, value in exact:
        by_row.setdefault((row, fields), []).append(value)
    by_count: dict[int, list[tuple[int, frozenset[str]]]] = {}
    for key, values in by_row.items():
        by_count.setdefault(len(values), []).append(key)
    found: list[ExactRow] = []
    for count, keys in by_count.items():
        stacked = torch.stack([values for key in keys for values in by_row[key]])
        rows = merge_rows(stacked.unflatten(0, (len(keys), count)).transpose(0, 1)) if count > 1 else stacked
        found += [ExactRow(*key, values) for key, values in zip(keys, islice(rows, len(keys)), strict=True)]
    return found
