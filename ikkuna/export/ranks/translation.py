"""Entries as rows that other ranks understand, and back."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ikkuna.distributed.block import Row
from ikkuna.distributed.layout import OWN, Key
from ikkuna.distributed.merge import Merged
from ikkuna.export.bus.bus import MessageBus
from ikkuna.export.messages.kinds import PARAMETER_KINDS, STATE_PREFIXES
from ikkuna.export.rows.plan import Demand, Plan
from ikkuna.export.rows.rows import Entry, Rows
from ikkuna.export.subscriber.registered import Registered

__all__ = ["Translation", "signature_of"]

_PLAIN = (bool, int, float, str, type(None))
_SHOWN_ONLY = frozenset(("title", "ylims", "backends", "message_bus", "evaluate"))
_TOGETHER = "measured together: "


def signature_of(subscriptions: Iterable[Registered]) -> list[str]:
    """Return a line for each subscription that tells everything which decides what it measures and when, the same on every rank."""
    lines = [_describe(s) for s in subscriptions]
    seen: Counter[str] = Counter()
    for i, line in enumerate(lines):
        seen[line] += 1
        if seen[line] > 1:
            lines[i] = f"{line} (the {seen[line]}th)"
    return lines


def _describe(subscription: Registered) -> str:
    subscriber = subscription.subscriber
    known = {name: value for name, value in sorted(vars(subscriber).items()) if name not in _SHOWN_ONLY}
    arguments = {name: value for name, value in known.items() if not name.startswith("_") and _is_plain(value)}
    wish = subscription.subscription
    arguments |= {"subsample": wish.subsample, "tag": wish.tag, "modules": _named(wish.modules)}
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{type(subscriber).__name__}({', '.join(subscription.kinds)}; {shown})"


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _named(modules: Any) -> Any:
    """Return a choice of modules in words; of a function only its name is the same on every rank."""
    return getattr(modules, "__qualname__", "a function") if callable(modules) else modules


class Translation:
    """Writes entries so that every rank can read them, and reads what all ranks made of them.

    Parameters
    ----------
    bus : whose subscribers there are
    place : returns the place of a kind and module
    """

    def __init__(self, bus: MessageBus, place: Callable[[str, str | None], Any]) -> None:
        self._bus = bus
        self._place = place
        self._demand = Demand()
        self._named: tuple[Registered, ...] = ()
        self._name_of: dict[Registered, str] = {}
        self._by_name: dict[str, Registered] = {}

    def _refresh(self) -> None:
        if self._bus.registered != self._named:
            self._named = self._bus.registered
            names = signature_of(self._named)
            self._name_of = dict(zip(self._named, names, strict=True))
            self._by_name = dict(zip(names, self._named, strict=True))

    def rows(self, rows: Rows) -> list[Row]:
        """Return what was measured here."""
        self._refresh()
        return [self._row(entry, rows) for entry in rows.entries.values()]

    def _row(self, entry: Entry, rows: Rows) -> Row:
        key = self._key(entry)
        is_parameter = _is_of_parameter(entry.place.kind)
        part = rows.parts.get(entry.key)
        if part is None:
            number = 0 if is_parameter else OWN
        else:
            number = part.number if is_parameter else part.data_number
        own = [
            (name, s.subscriber.merge, 0 if part is not None and s.subscriber.needs_whole else number, value.numpy())
            for s, value in (entry.measured or {}).items()
            if (name := self._name_of.get(s)) is not None
        ]
        return Row(key, number, entry.record, entry.task.fields, entry.is_mean, own)

    def _key(self, entry: Entry) -> Key:
        if entry.key[0] in self._name_of:  # measured together by one subscriber, whose entry it is
            return entry.place.kind, None, _TOGETHER + self._name_of[entry.key[0]]
        return entry.place.kind, entry.place.module, entry.path

    def keys_apart(self, rows: Rows) -> frozenset[Key]:
        """Return of which keys somebody wants the records of each rank."""
        entries = rows.entries.values()
        wanted = (e for e in entries if any(s.subscriber.per_rank for s in e.task.subscriptions))
        return frozenset(self._key(entry) for entry in wanted)

    def entries(self, rows: Rows, merged: Sequence[Merged]) -> dict[tuple[object, ...], Entry]:
        """Return the entries of all ranks, each with this rank's own message."""
        self._refresh()
        known = {self._key(entry): entry for entry in rows.entries.values()}
        plan = self._demand.plan(self._bus.registered, rows.stamp)
        found: dict[tuple[object, ...], Entry] = {}
        for one in merged:
            entry = known.get(one.key) or self._entry_of_others(one.key, rows, plan)
            if entry is not None:
                self._fill(entry, one)
                found[entry.key] = entry
        return found

    def _fill(self, entry: Entry, merged: Merged) -> None:
        entry.record, entry.is_mean = merged.record, merged.is_mean
        if entry.record is not None:
            entry.record.ranks = merged.ranks
        named = ((self._by_name.get(name), value) for name, value in (merged.own or {}).items())
        measured = {s: torch.from_numpy(value) for s, value in named if s is not None}
        entry.measured = measured or None

    def _entry_of_others(self, key: Key, rows: Rows, plan: Plan) -> Entry | None:
        """Return an entry for what only other ranks have seen, such as the modules of another stage of a pipeline."""
        kind, module, path = key
        if path.startswith(_TOGETHER):
            subscription = self._by_name.get(path.removeprefix(_TOGETHER))
            if subscription is None:
                return None
            return rows.entry_together(subscription)
        if (wanted := plan.task(kind, module)) is None:
            return None
        return rows.entry(self._place(kind, module), path, wanted)


def _is_of_parameter(kind: str) -> bool:
    return kind in PARAMETER_KINDS or kind.startswith(STATE_PREFIXES)
