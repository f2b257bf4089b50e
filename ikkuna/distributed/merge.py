"""The merge of the measurements of all ranks."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.alignment import AlignedOwn, AlignedTable, Alignment, Alignments
from ikkuna.distributed.block import RankBlock
from ikkuna.distributed.layout import Key
from ikkuna.numerics.statistics.table import COLUMN, Values, empty_rows, merge_rows

__all__ = ["MergedRows", "merge_blocks"]

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

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
