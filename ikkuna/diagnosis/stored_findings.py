"""The findings of a run as events, in the files ``findings.*.jsonl`` beside its values.

Each line is a JSON object with ``event``, ``step`` (the one at whose end it was judged) and ``time``:

============= =====================================================================================================
event         further fields
============= =====================================================================================================
``opened``    ``finding``: all fields of a :class:`~ikkuna.store.finding.Finding`
``changed``   ``rule``, ``severity``, ``modules``, ``consequences``, ``ended`` and ``against`` of a finding that is known
``ended``     the same; the rule does not see the mistake any more
``explained`` ``rule``: the finding has become a consequence of another one
``judged``    ``judged``, ``skipped`` and ``needed``: which rules could judge so far, and why the others could not
``resumed``   the training went back: the events of this step and later ones in the lines before do not count
============= =====================================================================================================

A line with ``lost`` counts events that could not be written, and one with ``replaces`` and ``size`` replaces the end of an earlier
file, as in ``values.*.jsonl``.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ikkuna.diagnosis.findings import Findings
from ikkuna.store.finding import Finding
from ikkuna.store.json_lines import parse_line, replaced_ends

__all__ = ["changes", "event_line", "event_text", "read_findings"]

_CHANGING = ("severity", "modules", "consequences", "ended", "against")


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
    """Return the findings that are stored in the directory of a run; ``None`` if it has no file of findings.

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
            if event is None or not isinstance(event.get("step"), int) or "event" not in event:
                continue
            if event["event"] == "resumed":
                events = [earlier for earlier in events if earlier["step"] < event["step"]]
            else:
                events.append(event)
    return _folded(events)


def _folded(events: list[dict[str, Any]]) -> Findings:
    """Return what a sequence of events leads to."""
    found: dict[str, Finding] = {}
    judged: dict[str, Any] = {}
    for event in events:
        if event["event"] == "opened":
            finding = _finding(event["finding"])
            found.setdefault(finding.rule, finding)
        elif event["event"] == "explained":
            found.pop(event["rule"], None)
        elif event["event"] == "judged":
            judged = event
        elif event.get("rule") in found:
            rule = event["rule"]
            fields = {**found[rule].as_dict(), **{field: event[field] for field in _CHANGING if field in event}}
            found[rule] = _finding(fields)
    return Findings(found.values(), judged.get("judged", ()), judged.get("skipped"), judged.get("needed"))


def _finding(fields: Mapping[str, Any]) -> Finding:
    known = {name: fields[name] for name in Finding.__dataclass_fields__ if name in fields}
    known["evidence"] = tuple((place, float(value)) for place, value in fields["evidence"])
    for name in ("modules", "consequences", "against"):
        known[name] = tuple(fields.get(name, ()))
    if known.get("limits") is not None:
        known["limits"] = tuple(map(float, known["limits"]))
    if known["value"] is not None:
        known["value"] = float(known["value"])
    return Finding(**known)
