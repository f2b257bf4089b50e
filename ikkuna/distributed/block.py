"""The measurements of one rank in one step as bytes, and their asynchronous exchange."""

import json
import struct
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ikkuna.numerics.statistics.table import COLUMN, COLUMNS, Values
from ikkuna.support.threads import BackgroundThread

_LENGTH = 8
_SMALLEST = 1 << 12
_REMEMBERED = 16


class Gather:
    """All-gathers payloads of bytes, one at a time, in blocks of one size.

    Gloo aborts the process if sizes differ within an operation, so every rank sends a block of the same size,
    ``[length of the payload, payload, padding]``.  All ranks receive all lengths.  If a payload did not fit,
    all ranks gather again with the next power of two that fits; if the largest of the last 16 payloads fits into
    a quarter of the block, all use a smaller one.  So a gather is one operation, except the first one and those that grow.

    Parameters
    ----------
    group : ProcessGroup
        A group that nothing else uses.
    size : int
        Number of ranks.

    Attributes
    ----------
    block : int
        Size of a block in bytes.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size
        self.block = _SMALLEST
        self._largest: deque[int] = deque(maxlen=_REMEMBERED)
        self._payload = b""
        self._work: Any = None
        self._sent = self._received = np.empty(0, np.uint8)

    @property
    def is_idle(self) -> bool:
        """Return whether no gather is in progress."""
        return self._work is None

    def begin(self, payload: bytes) -> None:
        """Start to gather a payload; errors of the group are raised."""
        self._payload = payload
        self._issue()

    def _issue(self) -> None:
        fits = len(self._payload) + _LENGTH <= self.block
        data = len(self._payload).to_bytes(_LENGTH, "little") + (self._payload if fits else b"")
        self._sent = np.zeros(self.block, np.uint8)
        self._sent[: len(data)] = np.frombuffer(data, np.uint8)
        self._received = np.empty((self._size, self.block), np.uint8)
        received, sent = torch.from_numpy(self._received.reshape(-1)), torch.from_numpy(self._sent)
        self._work = self._group._allgather_base(received, sent)

    def poll(self, patience: float = 0.0) -> list[memoryview] | None:
        """Return the payloads of all ranks, or ``None`` if they have not arrived.

        Parameters
        ----------
        patience : float
            Seconds to wait for them.

        Raises
        ------
        RuntimeError
            If a rank has failed, or the operation has timed out.
        """
        while self._work is not None:
            if not self._work.is_completed() and not (patience and self._waited(patience)):
                return None
            self._work.wait()  # raises the error of a failed operation
            self._work = None
            lengths = np.ascontiguousarray(self._received[:, :_LENGTH]).view("<i8")[:, 0].tolist()
            if (largest := max(lengths) + _LENGTH) > self.block:
                self.block = _power_of_two(largest)
                self._issue()
                continue
            self._resize(largest)
            return [self._received[rank, _LENGTH : _LENGTH + n].data for rank, n in enumerate(lengths)]
        return None

    def _waited(self, patience: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=patience))
        except RuntimeError:
            return bool(self._work.is_completed())  # failed, rather than timed out
        return True

    def _resize(self, largest: int) -> None:
        self._largest.append(largest)
        enough = _power_of_two(max(self._largest))
        if len(self._largest) == _REMEMBERED and 4 * enough <= self.block:
            self.block = max(2 * enough, _SMALLEST)

    def close(self) -> None:
        """Release the group without waiting for a running operation.

        The destructor of the group waits for that operation, so it runs in a daemon thread.
        """
        held, self._group, self._work = [self._group, self._work], None, None
        if held[1] is not None:
            BackgroundThread(held.clear, "ikkuna-gather-end").start()


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 1).bit_length()


Key = tuple[str, str | None, str]
"""Kind, module (``None`` for the network) and path."""

OWN = -1
"""The part of a row that only this rank has, unless all ranks of its group have the same numbers."""

_KEPT = 32


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of the same fields.

    Parameters
    ----------
    columns : tuple of str
        The statistics, in the order of the columns.
    codes : tuple
        The names of the histograms, and their numbers of bins.
    reduction : str
        ``"mean"`` or ``"sum"`` if the calls of each row become one number, otherwise empty.
    rows : tuple of int
        The indices of the keys.
    """

    columns: tuple[str, ...]
    codes: tuple[tuple[str, int], ...]
    reduction: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """The result of a subscriber's own ``measure``.

    Parameters
    ----------
    row : int
        The index of the key.
    subscriber : str
        The subscriber's signature, equal on all ranks.
    merge : str
        How results merge, see `Subscriber.merge`.
    shape : tuple of int
        The shape of the result.
    part : int
        Like the parts of the keys.
    """

    row: int
    subscriber: str
    merge: str
    shape: tuple[int, ...]
    part: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a block; equal layouts are the same object, so that comparisons are fast.

    Parameters
    ----------
    keys : tuple
        What was measured.
    parts : tuple of int
        For each key, which part of the whole this rank has.
        If several ranks have the same part, the first one counts; :data:`OWN` is a part that only this rank has.
    group : int
        Ranks with the same group process the same data, or slices of the same data.
    tables, own : tuple
        The numbers.
    """

    keys: tuple[Key, ...]
    parts: tuple[int, ...]
    group: int
    tables: tuple[Table, ...]
    own: tuple[Own, ...]

    @cached_property
    def text(self) -> bytes:
        """The layout as compressed JSON."""
        tables = [[t.columns, t.codes, t.reduction, t.rows] for t in self.tables]
        own = [[o.row, o.subscriber, o.merge, o.shape, o.part] for o in self.own]
        return zlib.compress(json.dumps([self.keys, self.parts, self.group, tables, own]).encode())

    @cached_property
    def name(self) -> str:
        """A short unique name."""
        return blake2b(self.text, digest_size=12).hexdigest()

    @classmethod
    def of_text(cls, text: bytes) -> "Layout":
        """Return the layout that has this text."""
        keys, parts, group, tables, own = json.loads(zlib.decompress(text))
        return cls(
            tuple((kind, module, path) for kind, module, path in keys),
            tuple(parts),
            group,
            tuple(Table(tuple(c), tuple((n, b) for n, b in h), m, tuple(r)) for c, h, m, r in tables),
            tuple(Own(r, s, m, tuple(shape), part) for r, s, m, shape, part in own),
        )


class Layouts:
    """The layouts that each rank has sent.

    A rank sends a layout when it uses it first, and its name after that.  After 32 layouts it forgets them all, and tells the receivers to
    forget them: a model whose layout changes from step to step costs bytes, but no memory.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._known: dict[int, dict[str, Layout]] = {}
        self._made: dict[tuple[Any, ...], Layout] = {}

    def make(self, fields: Sequence[Any]) -> Layout:
        """Return the layout with these fields, the same object for equal ones."""
        key = tuple(fields)
        if key not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            self._made[key] = Layout(*key)
        return self._made[key]

    def introduce(self, layout: Layout) -> Mapping[str, Any]:
        """Return the header fields that refer to a layout; they say whether its text follows because it is new."""
        if layout.name in self._sent:
            return {"layout": layout.name}
        if forget := len(self._sent) >= _KEPT:
            self._sent.clear()
        self._sent.add(layout.name)
        return {"layout": layout.name, "new": True, "forget": forget}

    def learn(self, rank: int, header: Mapping[str, Any], text: bytes) -> Layout:
        """Return the layout that a rank refers to; raise `KeyError` if the rank has not sent it."""
        known = self._known.setdefault(rank, {})
        if header.get("forget"):
            known.clear()
        if header.get("new"):
            layouts = (layouts.get(header["layout"]) for layouts in self._known.values())
            known[header["layout"]] = next(filter(None, layouts), None) or Layout.of_text(text)
        return known[header["layout"]]


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
