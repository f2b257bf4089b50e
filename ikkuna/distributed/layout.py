"""The meaning and order of the numbers in the blocks of a rank."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

__all__ = ["OWN", "Key", "Layout", "Layouts", "Own", "Table"]

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
