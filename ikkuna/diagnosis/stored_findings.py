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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikkuna.diagnosis.findings import Findings
from ikkuna.store.checks import MAX_INT, integer, known_fields, list_of, map_of, none, one_of, text
from ikkuna.store.finding import FIELDS, Finding, finding_of
from ikkuna.store.json_lines import parse_line, replaced_ends
from ikkuna.store.run_directory import CONTROL_FILE, SamplingRequest
from ikkuna.support.failures import suppressed

_STEP = integer(-MAX_INT)
_CHANGING = {name: FIELDS[name] for name in ("severity", "modules", "consequences", "ended", "against", "again")}
_JUDGED = {
    **dict.fromkeys(("judged", "mute"), list_of(text)),
    **dict.fromkeys(("skipped", "needed"), one_of(none, map_of(text))),
    "note": text,
}


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
    events: list[tuple[int, dict[str, Any]]] = []
    for content in contents.values():
        for line in content.splitlines():
            with suppressed(ValueError, KeyError):
                event = parse_line(line) or {}
                step = _STEP(event["step"], "the step")
                if event["event"] == "resumed":
                    events = [earlier for earlier in events if earlier[0] < step]
                else:
                    events.append((step, event))
    found = _folded(event for _, event in events)
    with suppressed(OSError, ValueError):
        found.muted |= SamplingRequest.parse((directory / CONTROL_FILE).read_text("utf-8")).mute
    return found


def _folded(events: Iterable[dict[str, Any]]) -> Findings:
    """Return what a sequence of events leads to, without those that lack a field or have a wrong one."""
    found: dict[str, Finding] = {}
    judged: dict[str, Any] = {}
    for event in events:
        with suppressed(ValueError, KeyError, TypeError):
            if event["event"] == "opened":
                finding = finding_of(event["finding"])
                found.setdefault(finding.rule, finding)
            elif event["event"] == "judged":
                judged = known_fields(event, "an event", _JUDGED)
            elif event["event"] == "explained":
                del found[event["rule"]]
            else:
                found[event["rule"]] = replace(found[event["rule"]], **known_fields(event, "an event", _CHANGING))
    muted = frozenset(judged.pop("mute", ()))
    findings = Findings(found.values(), **judged)
    findings.muted = muted
    return findings
