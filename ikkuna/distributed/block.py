"""What one rank measured in a step, as bytes."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikkuna.distributed.layout import Key, Layout, Layouts, Own, Table
from ikkuna.numerics.statistics import FIELDS, Record

__all__ = ["Block", "Counts", "Row", "build"]

_PREFIX = struct.Struct("<II")
_HISTOGRAMS = ("codes", "sampled_codes")
_SCALARS = tuple(name for name in FIELDS if name not in _HISTOGRAMS)
_ATTRIBUTE = {"mean": "center"}


@dataclass(slots=True)
class Row:
    """What one rank measured of one key.

    Parameters
    ----------
    key : of what
    part : which part of the whole it has
    record : its statistics, if anybody asked for fields
    fields : those fields
    is_mean : whether the record is a mean of as many elements as it says
    own : what subscribers measured themselves: subscriber, merge, part and row
    """

    key: Key
    part: int
    record: Record | None
    fields: frozenset[str]
    is_mean: bool = False
    own: Sequence[tuple[str, str, int, NDArray[np.float64]]] = ()


@dataclass(slots=True)
class Counts:
    """Histograms of the rows of a table, without their empty bins.

    Parameters
    ----------
    sizes : ``(rows,)``, how many bins of each are listed
    bins : ``(sum of sizes,)``, which
    counts : ``(sum of sizes,)``, how many elements are in them
    """

    sizes: NDArray[np.uint32]
    bins: NDArray[np.uint16]
    counts: NDArray[np.int64]


@dataclass(slots=True)
class Block:
    """What one rank measured in a step.

    Parameters
    ----------
    stamp : global step, step of the epoch, epoch, pass
    layout : what the numbers are of
    values : for each table ``(rows, columns)``
    counts : for each table its histograms by name
    own : what subscribers measured, flat, in the order of the layout
    skipped : whether the optimizer left the weights as they were
    lost : whether the numbers were given up, because this rank's memory for what waits was full
    """

    stamp: tuple[int, int, int, str]
    layout: Layout
    values: list[NDArray[np.float64]] = field(default_factory=list)
    counts: list[dict[str, Counts]] = field(default_factory=list)
    own: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    skipped: bool = False
    lost: bool = False

    def pack(self, layouts: Layouts) -> bytes:
        """Return the block as bytes, with its layout if it was never sent."""
        said = {"stamp": self.stamp, "skipped": self.skipped, "lost": self.lost, **layouts.introduce(self.layout)}
        header = json.dumps(said).encode()
        text = self.layout.text if "new" in said else b""
        parts = [_PREFIX.pack(len(header), len(text)), header, text, *(v.tobytes() for v in self.values)]
        for counts in (c for table in self.counts for c in table.values()):
            parts += [counts.sizes.tobytes(), counts.bins.tobytes(), counts.counts.tobytes()]
        return b"".join((*parts, self.own.tobytes()))

    @classmethod
    def unpack(cls, rank: int, data: memoryview | bytes, layouts: Layouts) -> "Block":
        """Return the block that `rank` sent."""
        header, text = _PREFIX.unpack_from(data)
        begin = _PREFIX.size + header
        said: Mapping[str, Any] = json.loads(bytes(data[_PREFIX.size : begin]))
        layout = layouts.learn(rank, said, bytes(data[begin : begin + text]))
        step, train_step, epoch, name = said["stamp"]
        block = cls((step, train_step, epoch, name), layout, skipped=said["skipped"], lost=said["lost"])
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
    rows: Sequence[Row],
    group: int,
    layouts: Layouts,
    skipped: bool = False,
    lost: bool = False,
) -> Block:
    """Return the block of what was measured.

    Parameters
    ----------
    stamp : of which step
    rows : what
    group : what this rank calls its group
    layouts : remembers the layout
    skipped, lost : see `Block`
    """
    by_fields: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        if row.record is not None:
            columns, histograms = _columns(row.fields)
            counts = ((name, getattr(row.record, name)) for name in histograms) if histograms else ()
            codes = tuple((name, len(found)) for name, found in counts if found is not None)
            by_fields.setdefault((columns, codes, row.is_mean), []).append(i)
    tables = tuple(Table(c, codes, is_mean, tuple(found)) for (c, codes, is_mean), found in by_fields.items())
    own = [(i, *measured) for i, row in enumerate(rows) for measured in row.own]
    described = tuple(Own(i, who, merge, value.shape, part) for i, who, merge, part, value in own)
    layout = layouts.make((tuple(r.key for r in rows), tuple(r.part for r in rows), group, tables, described))
    records = [[rows[i].record for i in table.rows] for table in tables]
    return Block(
        stamp,
        layout,
        [_values(found, table.columns) for found, table in zip(records, tables, strict=True)],
        [{name: _counts(found, name) for name, _ in t.codes} for found, t in zip(records, tables, strict=True)],
        np.concatenate([value.reshape(-1) for *_, value in own]) if own else np.empty(0),
        skipped,
        lost,
    )


@cache
def _columns(fields: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of `fields` are numbers, and which are histograms."""
    return tuple(f for f in _SCALARS if f in fields), tuple(f for f in _HISTOGRAMS if f in fields)


def _values(records: Sequence[Record | None], columns: Sequence[str]) -> NDArray[np.float64]:
    names = [_ATTRIBUTE.get(column, column) for column in columns]
    values = [[getattr(record, name) for name in names] for record in records]
    return np.array(values, np.float64)  # None becomes NaN


def _counts(records: Sequence[Record | None], name: str) -> Counts:
    dense = np.stack([getattr(record, name) for record in records])
    rows, bins = np.nonzero(dense)
    sizes = np.bincount(rows, minlength=len(dense)).astype(np.uint32)
    return Counts(sizes, bins.astype(np.uint16), dense[rows, bins].astype(np.int64))
