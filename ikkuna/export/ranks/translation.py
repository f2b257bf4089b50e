"""Translates measurements to keys that are equal on all ranks, and back."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ikkuna.distributed.block import RankRows
from ikkuna.distributed.dtensor import ShardPosition
from ikkuna.distributed.layout import OWN, Key
from ikkuna.distributed.merge import MergedRows
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES
from ikkuna.export.rows.rows import Rows
from ikkuna.export.rows.site import Site
from ikkuna.export.subscriber.registered import Registered
from ikkuna.numerics.statistics.table import empty_rows

__all__ = ["Translation", "signature_of"]

_PLAIN = (bool, int, float, str, type(None))
_SHOWN_ONLY = frozenset(("title", "ylims", "backends", "message_bus", "evaluate"))
_TOGETHER = "measured together: "
_NO_FIELDS = frozenset[str]()


def signature_of(subscriptions: Iterable[Registered]) -> list[str]:
    """Return a line per subscriber that names all its measurements depend on; equal on ranks that measure the same."""
    lines = [_describe(s) for s in subscriptions]
    seen: Counter[str] = Counter()
    for i, line in enumerate(lines):
        seen[line] += 1
        if seen[line] > 1:
            lines[i] = f"{line} (the {seen[line]}th)"
    return lines


def _describe(registered: Registered) -> str:
    subscriber = registered.subscriber
    known = {name: value for name, value in sorted(vars(subscriber).items()) if name not in _SHOWN_ONLY}
    arguments = {name: value for name, value in known.items() if not name.startswith("_") and _is_plain(value)}
    wish = registered.subscription
    arguments |= {
        "subsample": wish.subsample,
        "thinning": wish.thinning,
        "tag": wish.tag,
        "modules": _named(wish.modules),
    }
    limits = {"start": wish.start or None, "stop": wish.stop, "schedule": _named(wish.schedule)}
    arguments |= {name: value for name, value in limits.items() if value is not None}
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{type(subscriber).__name__}({', '.join(registered.kinds)}; {shown})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _named(modules: Any) -> Any:
    """Return a choice of modules as text; for a function its name, which is equal on all ranks."""
    return getattr(modules, "__qualname__", "a function") if callable(modules) else modules


class Translation:
    """Translates the measurements of a step to keys that are equal on all ranks, and back.

    Parameters
    ----------
    bus : MessageBus
        The bus of the subscribers.
    site : callable
        Returns the site of a kind and module.
    """

    def __init__(self, bus: MessageBus, site: Callable[[str, str | None], Site]) -> None:
        self._bus = bus
        self._site = site
        self._named: tuple[Registered, ...] = ()
        self._name_of: dict[Registered, str] = {}
        self._by_name: dict[str, Registered] = {}

    def _refresh(self) -> None:
        if self._bus.registered != self._named:
            self._named = self._bus.registered
            names = signature_of(self._named)
            self._name_of = dict(zip(self._named, names, strict=True))
            self._by_name = dict(zip(names, self._named, strict=True))

    def to_ranks(self, rows: Rows) -> RankRows:
        """Return the measurements of this rank."""
        self._refresh()
        numbers = rows.measured_rows()
        sites = [rows.keys[row] for row in numbers]
        parts = [self._part(site.kind, rows.shards.get(row)) for row, (site, _) in zip(numbers, sites, strict=True)]
        own = [
            (i, name, s.subscriber.merge, 0 if row in rows.shards and s.subscriber.needs_whole else parts[i], value)
            for i, row in enumerate(numbers)
            for s, value in rows.measured.get(row, {}).items()
            if (name := self._name_of.get(s)) is not None
        ]
        together = [(s, name, value) for s, value in rows.together.items() if (name := self._name_of.get(s))]
        own += [(i, name, s.subscriber.merge, OWN, value) for i, (s, name, value) in enumerate(together, len(numbers))]
        return RankRows(
            [(site.kind, site.module, path) for site, path in sites]
            + [(s.kinds[0], None, _TOGETHER + name) for s, name, _ in together],
            parts + [OWN] * len(together),
            [rows.fields(row) for row in numbers] + [_NO_FIELDS] * len(together),
            np.concatenate([rows.values[numbers], empty_rows(len(together))]),
            {i: rows.codes[row] for i, row in enumerate(numbers) if row in rows.codes},
            {i: rows.reductions[row] for i, row in enumerate(numbers) if row in rows.reductions},
            own,
        )

    @staticmethod
    def _part(kind: str, shard: ShardPosition | None) -> int:
        """Return the part of the whole that this rank has: all ranks have the same parameters, but each has its own data."""
        is_parameter = kind in PARAMETER_KINDS or kind.startswith(STATE_PREFIXES)
        if shard is None:
            return 0 if is_parameter else OWN
        return shard.number if is_parameter else shard.data_number

    def keys_per_rank(self, rows: Rows) -> frozenset[Key]:
        """Return the keys of which a subscriber needs the records of each rank."""
        return frozenset(
            (site.kind, site.module, path)
            for site, path in map(rows.keys.__getitem__, rows.measured_rows())
            if (task := rows.plan.task(site.kind, site.module)) is not None
            and any(s.subscriber.per_rank for s in task.subscriptions)
        )

    def from_ranks(self, rows: Rows, merged: MergedRows) -> None:
        """Replace the measurements of this rank by those of all ranks, such as modules of other stages of a pipeline."""
        self._refresh()
        row_of: dict[int, int] = {}
        together: dict[Registered, Any] = {}
        measured: dict[int, dict[Registered, Any]] = {}
        for i, (kind, module, path) in enumerate(merged.keys):
            named = ((self._by_name.get(name), value) for name, value in merged.own.get(i, {}).items())
            results = {s: value for s, value in named if s is not None}
            if path.startswith(_TOGETHER):
                together.update(results)
            elif rows.plan.task(kind, module) is not None:
                row = rows.index.row(self._site(kind, module), path)
                row_of[i] = row
                if results:
                    measured[row] = results
        rows.values = empty_rows(len(rows.keys))
        rows.values[list(row_of.values())] = merged.values[list(row_of)]
        rows.codes = {row_of[i]: codes for i, codes in merged.codes.items() if i in row_of}
        rows.reductions = {row_of[i]: reduction for i, reduction in merged.reductions.items() if i in row_of}
        rows.ranks = {row_of[i]: ranks for i, ranks in merged.ranks.items() if i in row_of}
        rows.measured, rows.together = measured, together
