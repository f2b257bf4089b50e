"""The merge of the measurements of all ranks: which rows belong together, and their sum."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.block import OWN, Key, Layout, Own, RankBlock
from ikkuna.numerics.statistics.table import COLUMN, Values, empty_rows, merge_rows

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
    parts : array
        ``(ranks,)``, the part of the whole that each rank has.
    """

    key: int
    own: Own
    begin: Index
    counts: Mask
    is_own: Mask
    parts: Index


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
        which = np.empty(len(layouts), np.int64)
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
        for rank, layout in enumerate(layouts):
            begin = 0
            for own in layout.own:
                key = number[layout.keys[own.row]], own.subscriber
                if key not in found:
                    missing, mask = np.full(len(layouts), -1), np.zeros(len(layouts), bool)
                    found[key] = AlignedOwn(key[0], own, missing, mask, mask.copy(), np.full(len(layouts), OWN))
                if found[key].own.shape == own.shape:  # results of different shapes do not merge
                    found[key].begin[rank] = begin
                    found[key].parts[rank] = own.part
                begin += int(np.prod(own.shape))
        for aligned in found.values():
            aligned.counts = first_of_each_part(aligned.parts[:, None], aligned.begin[:, None] >= 0)[:, 0]
            aligned.is_own = aligned.parts == OWN
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


_AT_ONCE = 1 << 21  # bounds each temporary array to 16 MiB
_REDUCE: dict[str, Callable[[Values], Values]] = {
    "sum": lambda values: values.sum(0),
    "min": lambda values: values.min(0),
    "max": lambda values: values.max(0),
    "last": lambda values: values[-1],
}


@dataclass(slots=True)
class MergedRows:
    """The measurements of all ranks.

    Parameters
    ----------
    keys : tuple
        What was measured; the keys of rank 0 come first.
    values : array
        ``(keys, columns)``; columns that were not measured are those of no elements.
    codes : dict
        Histograms by row and field.
    reductions : dict
        By row, how several calls become one number.
    own : dict
        The results of subscribers' own ``measure``, by row and subscriber.
    ranks : dict
        By row, the row of each rank, ``None`` for a rank without one; of the requested keys only.
    """

    keys: tuple[Key, ...]
    values: Values
    codes: dict[int, dict[str, NDArray[np.int64]]] = field(default_factory=dict)
    reductions: dict[int, str] = field(default_factory=dict)
    own: dict[int, dict[str, Values]] = field(default_factory=dict)
    ranks: dict[int, tuple[Values | None, ...]] = field(default_factory=dict)


def merge_blocks(blocks: Sequence[RankBlock], alignments: Alignments, per_rank: Collection[Key] = ()) -> MergedRows:
    """Return the measurements of all ranks together.

    If the ranks of a group have bit-identical numbers, these are replicas and count once; otherwise they are slices and all count.
    An activation that is bit-identical on all ranks although their data differ does not depend on the data, such as the embedding of
    positions: it counts once, as in one process.

    Parameters
    ----------
    blocks : sequence of RankBlocks
        One of each rank.
    alignments : Alignments
        Known alignments.
    per_rank : collection
        The keys of which to return the row of each rank, too.
    """
    alignment = alignments.of([block.layout for block in blocks])
    merged = MergedRows(alignment.keys, empty_rows(len(alignment.keys)))
    data_differ = _data_differ(blocks, alignment)
    with np.errstate(all="ignore"):
        for table in alignment.tables:
            width = len(table.columns) + sum(bins for _, bins in table.codes)
            step = max(1, _AT_ONCE // (len(blocks) * width))
            for begin in range(0, len(table.keys), step):
                _merge_rows(blocks, table, slice(begin, begin + step), alignment.groups, merged, per_rank, data_differ)
        for own in alignment.own:
            may_repeat = data_differ and _is_activation(alignment.keys[own.key])
            value = _merge_own(blocks, own, alignment.groups, may_repeat)
            merged.own.setdefault(own.key, {})[own.own.subscriber] = value
    return merged


def _is_activation(key: Key) -> bool:
    return key[0] == "activations"


def _data_differ(blocks: Sequence[RankBlock], alignment: Alignment) -> bool:
    """Return whether an activation differs between ranks."""
    for table in alignment.tables:
        rows = [i for i, key in enumerate(table.keys.tolist()) if _is_activation(alignment.keys[key])]
        if not rows:
            continue
        seen = _stacked(blocks, table, table.row[:, rows])
        counts = table.counts[:, rows] & table.is_own[:, rows]
        if not _equal_where(seen, counts).all():
            return True
    return False


def _stacked(blocks: Sequence[RankBlock], table: AlignedTable, row: Index) -> Values:
    """Return the values ``(ranks, rows, columns)``, arbitrary where a rank has no row."""
    missing = np.zeros((row.shape[1], len(table.columns)))
    tables = (b.values[i][found] if i >= 0 else missing for b, i, found in zip(blocks, table.table, row, strict=True))
    return np.stack(list(tables))


def _equal_where(seen: Values, counts: Mask) -> Mask:
    """Return for each row whether all ranks that count have the same bits."""
    bits = np.ascontiguousarray(seen).view(np.int64)
    first = np.take_along_axis(bits, counts.argmax(0)[None, :, None], 0)
    equal: Mask = ((bits == first).all(-1) | ~counts).all(0)
    return equal


def _merge_rows(
    blocks: Sequence[RankBlock],
    table: AlignedTable,
    chunk: slice,
    groups: Sequence[NDArray[np.int64]],
    merged: MergedRows,
    per_rank: Collection[Key],
    data_differ: bool,
) -> None:
    keys, row, columns = table.keys[chunk], table.row[:, chunk], [COLUMN[name] for name in table.columns]
    values = _stacked(blocks, table, row)
    histograms = {name: _dense(blocks, table, row, name, bins) for name, bins in table.codes}
    counts = table.counts[:, chunk].copy()
    seen = np.concatenate([values, *histograms.values()], -1) if groups or data_differ else values
    for ranks in groups:
        _count_replicas_once(seen, counts, table.is_own[:, chunk], ranks)
    if data_differ:
        repeats = np.array([_is_activation(merged.keys[key]) for key in keys.tolist()])
        _count_repeats_once(seen, counts, table.is_own[:, chunk], repeats)
    merged.values[keys[:, None], columns] = merge_rows(values, table.columns, counts)
    if table.reduction:
        merged.reductions |= dict.fromkeys(keys.tolist(), table.reduction)
    for name, dense in histograms.items():
        for key, total in zip(keys.tolist(), np.where(counts[..., None], dense, 0).sum(0), strict=True):
            merged.codes.setdefault(key, {})[name] = total
    for i, key in enumerate(keys.tolist() if per_rank else ()):
        if merged.keys[key] in per_rank:
            rows = empty_rows(len(blocks))
            rows[:, columns] = values[:, i]
            merged.ranks[key] = tuple(rows[rank] if row[rank, i] >= 0 else None for rank in range(len(blocks)))


def _dense(blocks: Sequence[RankBlock], table: AlignedTable, row: NDArray[np.int64], name: str, bins: int) -> Any:
    """Return the histograms ``(ranks, rows, bins)``."""
    dense = np.zeros((*row.shape, bins), np.int64)
    for rank, block in enumerate(blocks):
        if table.table[rank] < 0:
            continue
        counts = block.counts[table.table[rank]][name]
        ends = np.cumsum(counts.sizes, dtype=np.int64)
        for i, found in enumerate(row[rank]):
            if found >= 0:
                part = slice(int(ends[found] - counts.sizes[found]), int(ends[found]))
                dense[rank, i, counts.bins[part]] = counts.counts[part]
    return dense


def _count_replicas_once(seen: Values, counts: Mask, is_own: Mask, ranks: NDArray[np.int64]) -> None:
    """Let only the first rank of a group count in rows of which all its ranks have the same numbers.

    Parameters
    ----------
    seen : array
        ``(ranks, rows, numbers)``
    counts, is_own : array
        ``(ranks, rows)``; `counts` is changed.
    ranks : array
        The ranks of one group.
    """
    bits = np.ascontiguousarray(seen[ranks]).view(np.int64)
    all_count = (counts & is_own)[ranks].all(0)
    same = all_count & (bits == bits[:1]).all((0, 2))
    counts[np.ix_(ranks[1:], np.flatnonzero(same))] = False


def _count_repeats_once(seen: Values, counts: Mask, is_own: Mask, candidates: Mask) -> None:
    """Let only the first rank count in those of the rows `candidates` of which all ranks that count have the same numbers."""
    own = counts & is_own
    same = candidates & (own == counts).all(0) & _equal_where(seen, own)
    first = np.zeros_like(counts)
    np.put_along_axis(first, own.argmax(0)[None], True, 0)
    counts[:, same] &= first[:, same]


def _merge_own(
    blocks: Sequence[RankBlock], aligned: AlignedOwn, groups: Sequence[NDArray[np.int64]], may_repeat: bool
) -> Values:
    size = int(np.prod(aligned.own.shape))
    missing = np.zeros(size)
    if aligned.own.merge == "ranks":
        table = np.full((len(blocks), 1 + size), np.nan)
        for rank, begin in enumerate(aligned.begin.tolist()):
            if begin >= 0:
                table[rank, 0], table[rank, 1:] = aligned.parts[rank], blocks[rank].own[begin : begin + size]
        return table
    rows = [b.own[i : i + size] if i >= 0 else missing for b, i in zip(blocks, aligned.begin, strict=True)]
    seen = np.stack(rows)[:, None, :]
    counts = aligned.counts[:, None].copy()
    for ranks in groups:
        _count_replicas_once(seen, counts, aligned.is_own[:, None], ranks)
    if may_repeat:
        _count_repeats_once(seen, counts, aligned.is_own[:, None], np.ones(1, bool))
    counting = seen[counts[:, 0], 0]
    value: Values = _REDUCE[aligned.own.merge](counting).reshape(aligned.own.shape)
    return value.copy()
