r"""The numbers of all ranks made one.

Moments merge at once, not rank by rank: with :math:`k_r` finite elements of mean :math:`m_r` on rank :math:`r`,
:math:`m = \sum k_r m_r / \sum k_r` and :math:`d_r = m_r - m`,

.. math::
    M_2 = \sum M_{2r} + k_r d_r^2, \quad
    M_3 = \sum M_{3r} + 3 d_r M_{2r} + k_r d_r^3, \quad
    M_4 = \sum M_{4r} + 4 d_r M_{3r} + 6 d_r^2 M_{2r} + k_r d_r^4,

which is Chan, Golub & LeVeque (1979) and Pébay (2008) for any number of parts, in float64.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.alignment import AlignedOwn, AlignedTable, Alignments
from ikkuna.distributed.block import Block
from ikkuna.distributed.layout import Key
from ikkuna.numerics.statistics import Record

__all__ = ["Merged", "merge_blocks", "merge_values"]

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

_AT_ONCE = 1 << 21  # numbers that are merged together: a few temporary arrays of 16 MiB
_WHOLE = frozenset(("n", "zeros", "nans", "infs"))
_REDUCE: dict[str, Callable[[Values], Values]] = {
    "sum": lambda rows: rows.sum(0),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
    "last": lambda rows: rows[-1],
}
_SUMS = ("zeros", "l1", "sumsq", "nans", "infs")


@dataclass(slots=True)
class Merged:
    """What all ranks together measured of one key.

    Parameters
    ----------
    key : of what
    record : its statistics, if anybody asked for fields
    is_mean : whether the record is a mean of as many elements as it says
    own : what subscribers measured themselves, by subscriber
    ranks : the record of each rank before they were one, ``None`` for one without; empty unless asked for
    """

    key: Key
    record: Record | None = None
    is_mean: bool = False
    own: dict[str, Values] | None = None
    ranks: tuple[Record | None, ...] = ()


def merge_blocks(blocks: Sequence[Block], alignments: Alignments, apart: Collection[Key] = ()) -> list[Merged]:
    """Return what the blocks of all ranks say together, rank 0's keys first.

    Where the ranks of a group saw the same numbers, bit for bit, these are replicas and count once; else they are slices and all count.

    Parameters
    ----------
    blocks : of each rank
    alignments : remembers how they lie beside each other
    apart : of which keys to keep the records of each rank
    """
    alignment = alignments.of([block.layout for block in blocks])
    merged = [Merged(key) for key in alignment.keys]
    with np.errstate(all="ignore"):
        for table in alignment.tables:
            width = len(table.columns) + sum(bins for _, bins in table.codes)
            step = max(1, _AT_ONCE // (len(blocks) * width))
            for begin in range(0, len(table.keys), step):
                _merge_rows(blocks, table, slice(begin, begin + step), alignment.groups, merged, apart)
        for own in alignment.own:
            value = _merge_own(blocks, own, alignment.groups)
            merged[own.key].own = (merged[own.key].own or {}) | {own.own.subscriber: value}
    return merged


def _merge_rows(
    blocks: Sequence[Block],
    table: AlignedTable,
    chunk: slice,
    groups: Sequence[NDArray[np.int64]],
    merged: list[Merged],
    apart: Collection[Key],
) -> None:
    row = table.row[:, chunk]
    nothing = np.zeros((row.shape[1], len(table.columns)))
    tables = (b.values[i][found] if i >= 0 else nothing for b, i, found in zip(blocks, table.table, row, strict=True))
    values = np.stack(list(tables))  # with whatever where a rank lacks a row, since that does not count
    histograms = {name: _dense(blocks, table, row, name, bins) for name, bins in table.codes}
    counts = table.counts[:, chunk].copy()
    seen = np.concatenate([values, *histograms.values()], -1) if groups else values
    for ranks in groups:
        _count_replicas_once(seen, counts, table.is_own[:, chunk], ranks)
    together = merge_values(values, counts, table.columns)
    for name in histograms:
        histograms[name] = np.where(counts[..., None], histograms[name], 0)
    sums = {name: dense.sum(0) for name, dense in histograms.items()}
    records = _records(together, table.columns)
    for i, (number, record) in enumerate(zip(table.keys[chunk].tolist(), records, strict=True)):
        one = merged[number]
        one.record, one.is_mean = record, table.is_mean
        for name, total in sums.items():
            setattr(record, name, total[i])
        if apart and one.key in apart:
            is_there = row[:, i] >= 0
            found = iter(_records(values[is_there, i], table.columns))
            one.ranks = tuple(next(found) if there else None for there in is_there)


def _dense(blocks: Sequence[Block], table: AlignedTable, row: NDArray[np.int64], name: str, bins: int) -> Any:
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
    """Of ranks that saw the same of a row, let only the first count.

    Parameters
    ----------
    seen : ``(ranks, rows, numbers)``
    counts, is_own : ``(ranks, rows)``; `counts` is changed
    ranks : those of one group
    """
    bits = np.ascontiguousarray(seen[ranks]).view(np.int64)
    are_there = (counts & is_own)[ranks].all(0)
    same = are_there & (bits == bits[:1]).all((0, 2))
    counts[np.ix_(ranks[1:], np.flatnonzero(same))] = False


def merge_values(values: Values, counts: Mask, columns: Sequence[str]) -> Values:
    """Return the statistics of the elements of all ranks together.

    Parameters
    ----------
    values : ``(ranks, rows, columns)``
    counts : ``(ranks, rows)``, whose rows count; one without elements adds nothing
    columns : which statistics

    Returns
    -------
    array
        ``(rows, columns)``

    Examples
    --------
    >>> values = np.array([[[2.0, 1.0, 2.0]], [[1.0, 4.0, 0.0]]])                # of 0 and 2, and of 4
    >>> merge_values(values, np.ones((2, 1), bool), ("n", "mean", "m2"))[0].tolist()
    [3.0, 2.0, 8.0]
    """
    found = {name: np.ascontiguousarray(values[..., i]) for i, name in enumerate(columns)}
    counts = counts & (found["n"] > 0)
    merged = {"n": np.where(counts, found["n"], 0).sum(0)}
    for name in _SUMS:
        if name in found:
            merged[name] = np.where(counts, found[name], 0).sum(0)
    for name, pick, nothing in (("min", np.minimum, np.inf), ("max", np.maximum, -np.inf)):
        if name in found:
            extremum = pick.reduce(np.where(counts, found[name], nothing), axis=0)
            merged[name] = np.where(merged["n"] > 0, extremum, np.nan)
    if "mean" in found:
        finite = found["n"] - found.get("nans", 0) - found.get("infs", 0)
        merged |= _merge_moments(found, np.where(counts, finite, 0))
    return np.stack([merged[name] for name in columns], -1)


def _merge_moments(found: dict[str, Values], k: Values) -> dict[str, Values]:
    """Return the moments; `k`: ``(ranks, rows)``, the number of finite elements of each row that counts."""
    total = k.sum(0)
    mean, m2, m3, m4 = (
        np.where(k > 0, found[name], 0) if name in found else None for name in ("mean", "m2", "m3", "m4")
    )
    assert mean is not None
    shift = np.take_along_axis(mean, np.argmax(k > 0, axis=0)[None], 0)[0]  # about one of the means nothing cancels
    center = shift + (k * (mean - shift)).sum(0) / total
    merged = {"mean": center}
    d = np.where(k > 0, mean - center, 0)
    if m2 is not None:
        merged["m2"] = (m2 + k * d**2).sum(0)
    if m2 is not None and m3 is not None:
        merged["m3"] = (m3 + 3 * d * m2 + k * d**3).sum(0)
    if m2 is not None and m3 is not None and m4 is not None:
        merged["m4"] = (m4 + 4 * d * m3 + 6 * d**2 * m2 + k * d**4).sum(0)
    return merged


def _records(values: Values, columns: Sequence[str]) -> list[Record]:
    """Return the records of ``values: (rows, columns)``."""
    names = ["center" if name == "mean" else name for name in columns]
    by_column = (
        column.astype(np.int64).tolist() if name in _WHOLE else column.tolist()
        for name, column in zip(columns, values.T, strict=True)
    )
    return [Record(**dict(zip(names, row, strict=True))) for row in zip(*by_column, strict=True)]


def _merge_own(blocks: Sequence[Block], aligned: AlignedOwn, groups: Sequence[NDArray[np.int64]]) -> Values:
    size = int(np.prod(aligned.own.shape))
    nobody = np.zeros(size)
    rows = [b.own[i : i + size] if i >= 0 else nobody for b, i in zip(blocks, aligned.begin, strict=True)]
    seen = np.stack(rows)[:, None, :]
    counts = aligned.counts[:, None].copy()
    for ranks in groups:
        _count_replicas_once(seen, counts, aligned.is_own[:, None], ranks)
    counting = seen[counts[:, 0], 0]
    value: Values = _REDUCE[aligned.own.merge](counting).reshape(aligned.own.shape)
    return value.copy()
