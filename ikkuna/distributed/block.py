"""The measurements of one rank in one step, as bytes."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.layout import Key, Layout, Layouts, Own, Table
from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values

__all__ = ["Counts", "RankBlock", "RankRows", "build"]

_PREFIX = struct.Struct("<II")
_HISTOGRAMS = ("codes", "sampled_codes")


@dataclass(slots=True)
class RankRows:
    """The measurements of one rank in one step.

    Parameters
    ----------
    keys : sequence
        What was measured.
    parts : sequence of int
        For each key, which part of the whole this rank has.
    fields : sequence
        For each key, its shared statistics; empty for none.
    values : array
        ``(keys, columns)``, these statistics; see `ikkuna.numerics.statistics.table`.
    codes : mapping
        Histograms by row and field.
    reductions : mapping
        By row, how several calls become one number: ``"mean"`` or ``"sum"``; a missing row does not become one number.
    own : sequence
        The results of subscribers' own ``measure``: row, subscriber, way of merging, part and values.
    """

    keys: Sequence[Key]
    parts: Sequence[int]
    fields: Sequence[frozenset[str]]
    values: Values
    codes: Mapping[int, Mapping[str, NDArray[np.int64]]] = field(default_factory=dict)
    reductions: Mapping[int, str] = field(default_factory=dict)
    own: Sequence[tuple[int, str, str, int, NDArray[np.float64]]] = ()


@dataclass(slots=True)
class Counts:
    """Histograms of the rows of a table, without their empty bins.

    Parameters
    ----------
    sizes : array
        ``(rows,)``, number of listed bins of each row.
    bins : array
        ``(sum of sizes,)``, indices of the listed bins.
    counts : array
        ``(sum of sizes,)``, numbers of elements in them.
    """

    sizes: NDArray[np.uint32]
    bins: NDArray[np.uint16]
    counts: NDArray[np.int64]


@dataclass(slots=True)
class RankBlock:
    """Data of one step that one rank sends.

    Parameters
    ----------
    stamp : tuple
        Global step, step of the epoch, epoch, pass.
    layout : Layout
        The meaning of the numbers.
    values : list of arrays
        For each table ``(rows, columns)``.
    counts : list of dict
        For each table its histograms by name.
    own : array
        The results of subscribers' own ``measure``, flat, in the order of the layout.
    skipped : bool
        Whether the optimizer left the weights unchanged.
    lost : bool
        Whether the numbers were dropped because too many steps wait for other ranks.
    """

    stamp: tuple[int, int, int, str]
    layout: Layout
    values: list[NDArray[np.float64]] = field(default_factory=list)
    counts: list[dict[str, Counts]] = field(default_factory=list)
    own: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    skipped: bool = False
    lost: bool = False

    def pack(self, layouts: Layouts) -> bytes:
        """Return the block as bytes, with its layout if that was not sent before."""
        header_fields = {
            "stamp": self.stamp,
            "skipped": self.skipped,
            "lost": self.lost,
            **layouts.introduce(self.layout),
        }
        header = json.dumps(header_fields).encode()
        text = self.layout.text if "new" in header_fields else b""
        parts = [_PREFIX.pack(len(header), len(text)), header, text, *(v.tobytes() for v in self.values)]
        for counts in (c for table in self.counts for c in table.values()):
            parts += [counts.sizes.tobytes(), counts.bins.tobytes(), counts.counts.tobytes()]
        return b"".join((*parts, self.own.tobytes()))

    @classmethod
    def unpack(cls, rank: int, data: memoryview | bytes, layouts: Layouts) -> "RankBlock":
        """Return the block that `rank` sent."""
        header, text = _PREFIX.unpack_from(data)
        begin = _PREFIX.size + header
        sent: Mapping[str, Any] = json.loads(bytes(data[_PREFIX.size : begin]))
        layout = layouts.learn(rank, sent, bytes(data[begin : begin + text]))
        step, train_step, epoch, name = sent["stamp"]
        block = cls((step, train_step, epoch, name), layout, skipped=sent["skipped"], lost=sent["lost"])
        block._read(memoryview(data)[begin + text :])
        return block

    def _read(self, data: memoryview) -> None:
        offset = 0

        def take(count: int, dtype: Any) -> NDArray[Any]:
            nonlocal offset
            array = np.frombuffer(data, dtype, count, offset)
            offset += array.nbytes
            return array

        for table in self.layout.tables:
            shape = len(table.rows), len(table.columns)
            self.values.append(take(shape[0] * shape[1], np.float64).reshape(shape))
        for table in self.layout.tables:
            found = {}
            for name, _ in table.codes:
                sizes = take(len(table.rows), np.uint32)
                total = int(sizes.sum())
                found[name] = Counts(sizes, take(total, np.uint16), take(total, np.int64))
            self.counts.append(found)
        self.own = take(sum(int(np.prod(own.shape)) for own in self.layout.own), np.float64)


def build(
    stamp: tuple[int, int, int, str],
    rows: RankRows,
    group: int,
    layouts: Layouts,
    skipped: bool = False,
    lost: bool = False,
) -> RankBlock:
    """Return the block of a rank's measurements.

    Parameters
    ----------
    stamp, skipped, lost
        See `RankBlock`.
    rows : RankRows
        The measurements.
    group : int
        Number of this rank's group, see `Layout`.
    layouts : Layouts
        The layouts that this rank has sent.
    """
    by_fields: dict[Any, list[int]] = {}
    for i in np.flatnonzero(rows.values[:, COLUMN["n"]]).tolist():
        if rows.fields[i]:
            columns, histograms = _columns(rows.fields[i])
            codes = tuple((name, len(rows.codes[i][name])) for name in histograms)
            by_fields.setdefault((columns, codes, rows.reductions.get(i, "")), []).append(i)
    tables = tuple(Table(c, codes, reduction, tuple(found)) for (c, codes, reduction), found in by_fields.items())
    described = tuple(Own(i, who, merge, value.shape, part) for i, who, merge, part, value in rows.own)
    return RankBlock(
        stamp,
        layouts.make((tuple(rows.keys), tuple(rows.parts), group, tables, described)),
        [rows.values[np.ix_(table.rows, [COLUMN[name] for name in table.columns])] for table in tables],
        [{name: _counts([rows.codes[i][name] for i in table.rows]) for name, _ in table.codes} for table in tables],
        np.concatenate([value.reshape(-1) for *_, value in rows.own]) if rows.own else np.empty(0),
        skipped,
        lost,
    )


@cache
def _columns(fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of `fields` are columns of the table, and which are histograms."""
    return tuple(f for f in COLUMNS if f in fields), tuple(f for f in _HISTOGRAMS if f in fields)


def _counts(histograms: Sequence[NDArray[np.int64]]) -> Counts:
    dense = np.stack(histograms)
    rows, bins = np.nonzero(dense)
    sizes = np.bincount(rows, minlength=len(dense)).astype(np.uint32)
    return Counts(sizes, bins.astype(np.uint16), dense[rows, bins].astype(np.int64))
