"""Which rows of the ranks belong together."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.layout import OWN, Key, Layout, Own

__all__ = ["AlignedOwn", "AlignedTable", "Alignment", "Alignments", "first_of_each_part"]

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

_KEPT = 16


@dataclass(slots=True)
class AlignedTable:
    """The rows of all ranks that have the same fields.

    Parameters
    ----------
    columns, codes, reduction
        See `Table`.
    keys : array
        ``(rows,)``, index among the keys of all ranks.
    table : array
        ``(ranks,)``, index of the rank's table, -1 for none.
    row : array
        ``(ranks, rows)``, index of the row in that table, -1 for none.
    counts : array
        ``(ranks, rows)``, whether the row of the rank counts.
    is_own : array
        ``(ranks, rows)``, whether only this rank, or its group, has the row.
    """

    columns: tuple[str, ...]
    codes: tuple[tuple[str, int], ...]
    reduction: str
    keys: Index
    table: Index
    row: Index
    counts: Mask
    is_own: Mask


@dataclass(slots=True)
class AlignedOwn:
    """The results of a subscriber's own ``measure`` on all ranks.

    Parameters
    ----------
    key : int
        Index among the keys of all ranks.
    own : Own
        Description of the results.
    begin : array
        ``(ranks,)``, offset of the result of each rank, -1 for none.
    counts, is_own : array
        ``(ranks,)``, as in `AlignedTable`.
    """

    key: int
    own: Own
    begin: Index
    counts: Mask
    is_own: Mask


class Alignment:
    """The union of the layouts of all ranks: the keys of rank 0 in its order, then those that only other ranks have.

    Parameters
    ----------
    layouts : sequence of Layouts
        One of each rank.

    Attributes
    ----------
    keys : tuple
        The keys of all ranks.
    tables, own : list
        Which rows belong together.
    groups : list of arrays
        The ranks of each group that has several.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.keys: tuple[Key, ...] = tuple(
            dict.fromkeys(key for layout in dict.fromkeys(layouts) for key in layout.keys)
        )
        by_group: dict[int, list[int]] = {}
        for rank, layout in enumerate(layouts):
            by_group.setdefault(layout.group, []).append(rank)
        self.groups = [np.array(ranks) for ranks in by_group.values() if len(ranks) > 1]
        number = {key: i for i, key in enumerate(self.keys)}
        self.tables = self._tables(layouts, number)
        self.own = self._own(layouts, number)

    def _tables(self, layouts: Sequence[Layout], number: dict[Key, int]) -> list[AlignedTable]:
        rows_of: dict[Any, dict[int, None]] = {}
        for layout in dict.fromkeys(layouts):
            for table in layout.tables:
                rows = rows_of.setdefault((table.columns, table.codes, table.reduction), {})
                rows.update(dict.fromkeys(number[layout.keys[i]] for i in table.rows))
        return [self._table(layouts, number, fields, sorted(rows)) for fields, rows in rows_of.items()]

    @staticmethod
    def _table(layouts: Sequence[Layout], number: dict[Key, int], fields: Any, keys: list[int]) -> AlignedTable:
        columns, codes, reduction = fields
        position = {key: i for i, key in enumerate(keys)}
        which = np.full(len(layouts), -1)
        row = np.full((len(layouts), len(keys)), -1)
        part = np.full((len(layouts), len(keys)), OWN)
        known: dict[Any, tuple[int, Index, Index]] = {}  # most ranks differ in their parts, not in their rows
        for rank, layout in enumerate(layouts):
            if (structure := (layout.keys, layout.tables)) not in known:
                known[structure] = _find(
                    layout, fields, {key: position[i] for key, i in number.items() if i in position}
                )
            which[rank], rows, found = known[structure]
            row[rank, found] = range(len(found))
            part[rank, found] = np.array(layout.parts)[rows]
        counts = first_of_each_part(part, row >= 0)
        return AlignedTable(columns, codes, reduction, np.array(keys), which, row, counts, part == OWN)

    @staticmethod
    def _own(layouts: Sequence[Layout], number: dict[Key, int]) -> list[AlignedOwn]:
        found: dict[tuple[int, str], AlignedOwn] = {}
        parts: dict[tuple[int, str], Index] = {}
        for rank, layout in enumerate(layouts):
            begin = 0
            for own in layout.own:
                key = number[layout.keys[own.row]], own.subscriber
                if key not in found:
                    missing, mask = np.full(len(layouts), -1), np.zeros(len(layouts), bool)
                    found[key] = AlignedOwn(key[0], own, missing, mask, mask.copy())
                    parts[key] = np.full(len(layouts), OWN)
                if found[key].own.shape == own.shape:  # results of different shapes do not merge
                    found[key].begin[rank] = begin
                    parts[key][rank] = own.part
                begin += int(np.prod(own.shape))
        for key, aligned in found.items():
            aligned.counts = first_of_each_part(parts[key][:, None], aligned.begin[:, None] >= 0)[:, 0]
            aligned.is_own = parts[key] == OWN
        return list(found.values())


def _find(layout: Layout, fields: Any, position: dict[Key, int]) -> tuple[int, Index, Index]:
    """Return the index of the table with these fields (-1 for none), its rows, and their positions in the rows of all ranks."""
    for i, table in enumerate(layout.tables):
        if (table.columns, table.codes, table.reduction) == fields:
            return i, np.array(table.rows), np.array([position[layout.keys[j]] for j in table.rows])
    return -1, np.empty(0, np.int64), np.empty(0, np.int64)


def first_of_each_part(part: Index, is_there: Mask) -> Mask:
    """Return which rows count: of ranks that have the same part the first one, and every part that only one rank has.

    Parameters
    ----------
    part : array
        ``(ranks, rows)``
    is_there : array
        ``(ranks, rows)``, whether the rank has the row.

    Returns
    -------
    array
        ``(ranks, rows)``

    Examples
    --------
    >>> first_of_each_part(np.array([[0, 0, -1], [0, 1, -1]]), np.array([[True, True, True], [True, True, False]]))
    array([[ True,  True,  True],
           [False,  True, False]])
    """
    order = np.argsort(np.where(is_there, part, np.iinfo(np.int64).max), axis=0, kind="stable")
    ordered = np.take_along_axis(part, order, 0)
    is_first = np.ones_like(is_there)
    is_first[1:] = (ordered[1:] != ordered[:-1]) | (ordered[1:] == OWN)
    counts = np.empty_like(is_there)
    np.put_along_axis(counts, order, is_first, 0)
    return counts & is_there


class Alignments:
    """The alignments of the last 16 combinations of layouts, because an alignment is slow to compute and most steps are alike."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Layout, ...], Alignment] = OrderedDict()

    def of(self, layouts: Sequence[Layout]) -> Alignment:
        """Return the alignment of the layouts of all ranks."""
        key = tuple(layouts)
        if key not in self._known:
            self._known[key] = Alignment(layouts)
        self._known.move_to_end(key)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return self._known[key]
