"""The findings of a run as events, in the files ``findings.*.jsonl`` beside its values.

Each line is a JSON object with ``event``, ``step`` (the one at whose end it was judged) and ``time``:

============= =====================================================================================================
event         further fields
============= =====================================================================================================
``opened``    ``finding``: all fields of a :class:`~ikkuna.store.finding.Finding`
``changed``   ``rule``, ``severity``, ``modules``, ``consequences``, ``ended``, ``against`` and ``again`` of a known finding
``ended``     the same; the rule does not see the mistake any more
``explained`` ``rule``: the finding has become a consequence of another one
``judged``    ``judged``, ``skipped``, ``needed``, ``note`` and ``mute``: which rules could judge, why others could not, what is muted
``resumed``   the training went back: the events of this step and later ones in the lines before do not count
============= =====================================================================================================

A line with ``lost`` counts events that could not be written, and one with ``replaces`` and ``size`` replaces the end of an earlier
file, as in ``values.*.jsonl``.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ikkuna.diagnosis.findings import Findings
from ikkuna.store.finding import SEVERITIES, Finding
from ikkuna.store.json_lines import parse_line, replaced_ends
from ikkuna.store.run_directory import CONTROL_FILE, SamplingRequest
from ikkuna.support.failures import suppressed

_Check = Callable[[Any], bool]
_CHANGING = ("severity", "modules", "consequences", "ended", "against", "again")


def changes(before: Mapping[str, Finding], after: Mapping[str, Finding]) -> Iterator[dict[str, Any]]:
    """Yield the events that lead from some findings by rule to others.

    Examples
    --------
    >>> found = {"dead_units": Finding("dead_units", "warning", "All units are dead.", "fc1", step=3)}
    >>> [event["event"] for event in changes({}, found)], list(changes(found, {}))
    (['opened'], [{'event': 'explained', 'rule': 'dead_units'}])
    """
    for rule in before.keys() - after.keys():
        yield {"event": "explained", "rule": rule}
    for rule, finding in after.items():
        known = before.get(rule)
        if known is None:
            yield {"event": "opened", "finding": finding.as_dict()}
        elif known != finding:
            name = "ended" if finding.ended is not None and known.ended is None else "changed"
            yield {"event": name, "rule": rule, **{field: getattr(finding, field) for field in _CHANGING}}


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event as JSON."""
    return json.dumps(_plain(event))


def event_line(text: str, step: int, time: float) -> str:
    """Return the line of an event, which is JSON, at a step and time."""
    return f'{text[:-1]}, "step": {step}, "time": {time:.3f}}}\n'


def _plain(value: Any) -> Any:
    """Return a value with the texts of numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_findings(directory: Path) -> Findings | None:
    """Return the findings that are stored in the directory of a run, also muted ones; ``None`` if it has no file of findings.

    Damaged and incomplete lines are skipped.
    """
    contents = {path.name: path.read_bytes() for path in sorted(directory.glob("findings.*.jsonl"))}
    if not contents:
        return None
    for name, size in replaced_ends(contents):
        contents[name] = contents[name][:size]
    events: list[dict[str, Any]] = []
    for content in contents.values():
        for line in content.splitlines():
            event = parse_line(line)
            if event is None or not _is_whole(event.get("step")) or "event" not in event:
                continue
            if event["event"] == "resumed":
                events = [earlier for earlier in events if earlier["step"] < event["step"]]
            else:
                events.append(event)
    found = _folded(events)
    with suppressed(OSError, ValueError):
        found.muted |= SamplingRequest.parse((directory / CONTROL_FILE).read_text("utf-8")).mute
    return found


def _folded(events: list[dict[str, Any]]) -> Findings:
    """Return what a sequence of events leads to, without those that lack a field or have a wrong one."""
    found: dict[str, Finding] = {}
    judged: dict[str, Any] = {}
    for event in events:
        rule = event.get("rule")
        if event["event"] == "opened":
            if (finding := _finding(event.get("finding"))) is not None:
                found.setdefault(finding.rule, finding)
        elif event["event"] == "judged":
            is_right = all(_JUDGED[name](event[name]) for name in _JUDGED.keys() & event.keys())
            judged = event if is_right else judged
        elif not isinstance(rule, str) or rule not in found:
            continue
        elif event["event"] == "explained":
            del found[rule]
        else:
            fields = {**found[rule].as_dict(), **{field: event[field] for field in _CHANGING if field in event}}
            found[rule] = _finding(fields) or found[rule]
    standing = judged.get("judged", ()), judged.get("skipped"), judged.get("needed"), judged.get("note", "")
    findings = Findings(found.values(), *standing)
    findings.muted = frozenset(judged.get("mute", ()))
    return findings


def _finding(fields: object) -> Finding | None:
    """Return a finding, or ``None`` if a field is missing or has a wrong type: the file may be made to harm its reader."""
    if not isinstance(fields, Mapping) or not fields.keys() >= _NEEDED:
        return None
    known = {name: fields[name] for name in Finding.__dataclass_fields__ if name in fields}
    if not all(_FIELDS[name](value) for name, value in known.items()):
        return None
    known["evidence"] = tuple((place, float(value)) for place, value in fields["evidence"])
    for name in ("modules", "consequences", "against", "again"):
        known[name] = tuple(fields.get(name, ()))
    if known.get("value") is not None:
        known["value"] = float(known["value"])
    if known.get("limits") is not None:
        low, high = known["limits"]
        known["limits"] = float(low), float(high)
    return Finding(**known)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_number(value: object) -> bool:
    """Return whether `float` converts a value: JSON has no NaN and no infinities, so these are texts."""
    return isinstance(value, float) or _is_whole(value) or value in ("NaN", "Infinity", "-Infinity")


def _is_evidence(value: object) -> bool:
    return _is_pair(value) and (_is_whole(value[0]) or _is_text(value[0])) and _is_number(value[1])


def _is_pair(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and len(value) == 2


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _is_texts_by_text(value: object) -> bool:
    return not value or (isinstance(value, Mapping) and all(map(_is_text, value.values())))


_NEEDED = {"rule", "severity", "message", "evidence", "modules", "consequences"}
_FIELDS: dict[str, _Check] = {
    **dict.fromkeys(("rule", "message", "advice", "class_name", "source"), _is_text),
    **dict.fromkeys(("module", "kind"), _or_none(_is_text)),
    **dict.fromkeys(("step", "ended"), _or_none(_is_whole)),
    **dict.fromkeys(("modules", "consequences", "against"), _list_of(_is_text)),
    "again": _list_of(_is_whole),
    "severity": lambda value: _is_text(value) and value in SEVERITIES,
    "value": _or_none(_is_number),
    "limits": _or_none(lambda value: _is_pair(value) and all(map(_is_number, value))),
    "evidence": _list_of(_is_evidence),
    "version": _is_whole,
}
_JUDGED: dict[str, _Check] = {
    "judged": _list_of(_is_text),
    "skipped": _is_texts_by_text,
    "needed": _is_texts_by_text,
    "note": _is_text,
    "mute": _list_of(_is_text),
}
