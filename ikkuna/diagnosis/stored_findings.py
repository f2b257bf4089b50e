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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikkuna.diagnosis.findings import Findings
from ikkuna.store.finding import Finding
from ikkuna.store.json_lines import parse_line, replaced_ends
from ikkuna.store.run_directory import CONTROL_FILE, SamplingRequest
from ikkuna.support.failures import suppressed

_Read = Callable[[Any], Any]


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
                step = _whole(event["step"])
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
                finding = Finding(**_read(event["finding"], _FIELDS))
                found.setdefault(finding.rule, finding)
            elif event["event"] == "judged":
                judged = _read(event, _JUDGED)
            elif event["event"] == "explained":
                del found[event["rule"]]
            else:
                found[event["rule"]] = replace(found[event["rule"]], **_read(event, _CHANGING))
    muted = frozenset(judged.pop("mute", ()))
    findings = Findings(found.values(), **judged)
    findings.muted = muted
    return findings


def _read(entry: object, fields: Mapping[str, _Read]) -> dict[str, Any]:
    """Return the known fields of an entry, which may be made to harm its reader; raise `ValueError` if one has a wrong type."""
    return {name: fields[name](value) for name, value in _mapping(entry).items() if name in fields}


def _checked(is_right: Callable[[Any], bool]) -> _Read:
    def read(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"unexpected {value!r}")
        return value

    return read


_text = _checked(lambda value: isinstance(value, str))
_whole = _checked(lambda value: type(value) is int and abs(value) < 1 << 63)
_list = _checked(lambda value: isinstance(value, list | tuple))
_mapping = _checked(lambda value: isinstance(value, Mapping))


def _number(value: object) -> float:
    """Return a number; JSON has no NaN and no infinities, so these are texts."""
    return float(value if isinstance(value, float) or value in ("NaN", "Infinity", "-Infinity") else _whole(value))


def _place(value: object) -> Any:
    return value if isinstance(value, str) else _whole(value)


def _texts_by_text(value: object) -> dict[str, str]:
    return {name: _text(text) for name, text in _mapping(value or {}).items()}


def _or_none(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _list_of(read: _Read) -> _Read:
    return lambda value: tuple(map(read, _list(value)))


def _pair_of(*reads: _Read) -> _Read:
    return lambda value: tuple(read(item) for read, item in zip(reads, _list(value), strict=True))


_FIELDS: dict[str, _Read] = {
    **dict.fromkeys(("rule", "severity", "message", "advice", "class_name", "source"), _text),
    **dict.fromkeys(("module", "kind"), _or_none(_text)),
    **dict.fromkeys(("step", "ended"), _or_none(_whole)),
    **dict.fromkeys(("modules", "consequences", "against"), _list_of(_text)),
    "again": _list_of(_whole),
    "value": _or_none(_number),
    "limits": _or_none(_pair_of(_number, _number)),
    "evidence": _list_of(_pair_of(_place, _number)),
    "version": _whole,
}
_CHANGING = {name: _FIELDS[name] for name in ("severity", "modules", "consequences", "ended", "against", "again")}
_JUDGED: dict[str, _Read] = {
    "judged": _list_of(_text),
    "skipped": _texts_by_text,
    "needed": _texts_by_text,
    "note": _text,
    "mute": _list_of(_text),
}
"""For each field the function that returns its value, and raises `ValueError` if its type is wrong."""
