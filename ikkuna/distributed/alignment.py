"""How the rows of all ranks lie beside each other, whatever each of them has."""

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
    """Rows of the same fields, of all ranks.

    Parameters
    ----------
    columns, codes, reduction : as in `Table`
    keys : ``(rows,)``, which of the keys of all ranks
    table : ``(ranks,)``, which table of the rank's it is, -1 for none
    row : ``(ranks, rows)``, which row of that table, -1 for none
    counts : ``(ranks, rows)``, whose row counts
    is_own : ``(ranks, rows)``, whether a row holds what its rank alone has seen, or its group
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
    """What a subscriber measured itself, on all ranks.

    Parameters
    ----------
    key : which of the keys of all ranks
    own : what it is
    begin : ``(ranks,)``, where each rank's row begins, -1 for none
    counts, is_own : ``(ranks,)``, as in `AlignedTable`
    """

    key: int
    own: Own
    begin: Index
    counts: Mask
    is_own: Mask


class Alignment:
    """The union of the layouts of all ranks: rank 0's keys in its order, then those that only others have.

    Parameters
    ----------
    layouts : of each rank

    Attributes
    ----------
    keys : what there are rows of
    tables, own : where they are found
    groups : the ranks of each group that has several
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
        place = {key: i for i, key in enumerate(keys)}
        which = np.full(len(layouts), -1)
        row = np.full((len(layouts), len(keys)), -1)
        part = np.full((len(layouts), len(keys)), OWN)
        known: dict[Any, tuple[int, Index, Index]] = {}  # ranks differ in their parts rather than in their rows
        for rank, layout in enumerate(layouts):
            if (structure := (layout.keys, layout.tables)) not in known:
                known[structure] = _find(layout, fields, {key: place[i] for key, i in number.items() if i in place})
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
                    nobody, mask = np.full(len(layouts), -1), np.zeros(len(layouts), bool)
                    found[key] = AlignedOwn(key[0], own, nobody, mask, mask.copy())
                    parts[key] = np.full(len(layouts), OWN)
                if found[key].own.shape == own.shape:  # rows of other shapes do not merge, in one process either
                    found[key].begin[rank] = begin
                    parts[key][rank] = own.part
                begin += int(np.prod(own.shape))
        for key, aligned in found.items():
            aligned.counts = first_of_each_part(parts[key][:, None], aligned.begin[:, None] >= 0)[:, 0]
            aligned.is_own = parts[key] == OWN
        return list(found.values())


def _find(layout: Layout, fields: Any, place: dict[Key, int]) -> tuple[int, Index, Index]:
    """Return which table of a layout has these fields (-1 for none), its rows, and where these belong among those of all."""
    for i, table in enumerate(layout.tables):
        if (table.columns, table.codes, table.reduction) == fields:
            return i, np.array(table.rows), np.array([place[layout.keys[j]] for j in table.rows])
    return -1, np.empty(0, np.int64), np.empty(0, np.int64)


def first_of_each_part(part: Index, is_there: Mask) -> Mask:
    """Return who counts: of the ranks that have the same part of a row the first, and everyone whose part is its own.

    Parameters
    ----------
    part : ``(ranks, rows)``
    is_there : ``(ranks, rows)``, whether the rank has the row at all

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
    """The alignments of the layouts that were met last: it takes a while to find one, and a step looks like the one before."""

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
