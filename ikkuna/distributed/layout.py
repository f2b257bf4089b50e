"""What a rank's numbers are of, and in which order they stand in its blocks."""

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
"""The part of a row that holds what this rank alone has seen, unless the ranks of its group have all seen the same."""

_KEPT = 32


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of the same fields.

    Parameters
    ----------
    columns : which statistics, in the order of their columns
    codes : which histograms, and of how many bins
    reduction : ``"mean"`` or ``"sum"`` if the calls of each row become one number, otherwise empty
    rows : which keys
    """

    columns: tuple[str, ...]
    codes: tuple[tuple[str, int], ...]
    reduction: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """What a subscriber measured itself.

    Parameters
    ----------
    row : which key
    subscriber : whose it is, in words that are the same on every rank
    merge : how its rows become one
    shape : of the row
    part : like the parts of the keys
    """

    row: int
    subscriber: str
    merge: str
    shape: tuple[int, ...]
    part: int


@dataclass(frozen=True, eq=False)
class Layout:
    """What stands where in a block; equal layouts are made the same object, so that they are found quickly.

    Parameters
    ----------
    keys : what there are rows of
    parts : for each key, which part of the whole this rank has.
        Of several ranks that have the same part the first counts; :data:`OWN` is a part that only this rank has.
    group : the ranks that name the same group see the same data, or slices of the same
    tables, own : the numbers
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
        """A short name that no other layout has."""
        return blake2b(self.text, digest_size=12).hexdigest()

    @classmethod
    def of_text(cls, text: bytes) -> "Layout":
        """Return the layout that was written as `text`."""
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

    A rank sends a layout when it first uses it, and after that its name.  When it has sent 32 it forgets them all, says so, and so do
    those who receive: models whose layout differs from step to step cost bytes and not memory.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._known: dict[int, dict[str, Layout]] = {}
        self._made: dict[tuple[Any, ...], Layout] = {}

    def make(self, parts: Sequence[Any]) -> Layout:
        """Return the layout of these parts, the same object for the same parts."""
        key = tuple(parts)
        if key not in self._made:
            if len(self._made) >= _KEPT:
                self._made.clear()
            self._made[key] = Layout(*key)
        return self._made[key]

    def introduce(self, layout: Layout) -> Mapping[str, Any]:
        """Return what to say of a layout that is used now; its text goes along if it is new."""
        if layout.name in self._sent:
            return {"layout": layout.name}
        if forget := len(self._sent) >= _KEPT:
            self._sent.clear()
        self._sent.add(layout.name)
        return {"layout": layout.name, "new": True, "forget": forget}

    def learn(self, rank: int, said: Mapping[str, Any], text: bytes) -> Layout:
        """Return the layout a rank speaks of; raise `KeyError` for one it never sent."""
        known = self._known.setdefault(rank, {})
        if said.get("forget"):
            known.clear()
        if said.get("new"):
            layouts = (layouts.get(said["layout"]) for layouts in self._known.values())
            known[said["layout"]] = next(filter(None, layouts), None) or Layout.of_text(text)
        return known[said["layout"]]
