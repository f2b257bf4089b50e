"""Findings, their table, and the folding of findings that have one cause."""

import html
import shutil
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ikkuna.printable import printable
from ikkuna.store.finding import LATER_STEPS, SEVERITIES, Finding
from ikkuna.store.sparkline import svg_sparkline

STYLES = {"info": ("blue",), "warning": ("bold", "yellow"), "error": ("bold", "red")}
"""The styles of the severities in a terminal."""

_HTML_COLOURS = {"info": "#3b82f6", "warning": "#d97706", "error": "#dc2626"}

Styled = Callable[..., str]
"""Returns a text with styles: ``styled(text, "bold", "red")``."""


def _plain(text: str, *styles: str) -> str:
    return text


def is_muted(finding: Finding, muted: Collection[str]) -> bool:
    """Return whether the rule of a finding is muted, or all modules of the finding are muted for its rule.

    Examples
    --------
    >>> is_muted(Finding("dead_units", "warning", "All units are dead.", "fc1"), {"dead_units:fc1"})
    True
    """
    modules, rule = finding.modules or (finding.module,), finding.rule
    return rule in muted or all(f"{rule}:{module}" in muted for module in modules)


_NAMED = 8


class Findings(tuple[Finding, ...]):
    """The findings of a diagnosis, the most severe first; ``print()`` shows them as a table.

    Parameters
    ----------
    findings : iterable of Finding
        The findings.
    judged : iterable of str
        The names of the rules or checks that could judge.
    skipped : mapping of str to str
        The names of the rules or checks that could not judge, and why.
    needed : mapping of str to str
        What would let rules in `skipped` judge, such as a subscriber to register.
    note : str
        Where the findings come from, if they are not those that the rules found while the model trained.

    Examples
    --------
    >>> found = Findings([Finding("dead_units", "warning", "All units are dead.", "fc1", advice="lower the bias")],
    ...                  judged=["dead_units"], skipped={"loss_at_init": "no loss was given"})
    >>> print(found)
    severity  rule        module  step  finding
    --------  ----------  ------  ----  -------
    warning   dead_units  fc1     -     All units are dead.
                                        Try: lower the bias.
    1 warning; 1 check judged, 1 could not:
      loss_at_init: no loss was given
    >>> [finding.module for finding in found], len(found.errors)
    (['fc1'], 0)
    >>> print(found.as_markdown())
    | severity | rule | module | since step | finding | what to try |
    |:--|:--|:--|--:|:--|:--|
    | warning | dead_units | `fc1` |  | All units are dead. | lower the bias |
    """

    judged: tuple[str, ...]
    skipped: Mapping[str, str]
    needed: Mapping[str, str]
    note: str
    muted: frozenset[str] = frozenset()
    """What is muted, as ``"rule"`` or ``"rule:module"``."""

    def __new__(
        cls,
        findings: Iterable[Finding] = (),
        judged: Iterable[str] = (),
        skipped: Mapping[str, str] | None = None,
        needed: Mapping[str, str] | None = None,
        note: str = "",
    ) -> "Findings":
        """Sort `findings` by their severity."""
        ordered = sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
        self = super().__new__(cls, ordered)
        self.judged = tuple(judged)
        self.skipped = dict(skipped or {})
        self.needed = dict(needed or {})
        self.note = note
        return self

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of the severity ``error``."""
        return tuple(finding for finding in self if finding.severity == "error")

    def heard(self) -> "Findings":
        """Return the findings that are not muted; the note counts the others."""
        found = [finding for finding in self if not is_muted(finding, self.muted)]
        count = len(self) - len(found)
        told = (
            f"{count} muted {'finding is' if count == 1 else 'findings are'} not shown; --muted shows them."
            if count
            else ""
        )
        return Findings(found, self.judged, self.skipped, self.needed, " ".join(filter(None, (self.note, told))))

    def as_markdown(self) -> str:
        """Return the findings as a table in Markdown, for pages of text."""
        lines = ["| severity | rule | module | since step | finding | what to try |", "|:--|:--|:--|--:|:--|:--|"]
        for f in self:
            modules = ", ".join(f"`{name}`" for name in f.modules or ((f.place,) if f.module else ()))
            text = " ".join((f.message, *(line for line in f.lines() if not line.startswith("Try: "))))
            cells = (f.severity, f.rule, modules, "" if f.step is None else str(f.step), text, f.advice)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        return "\n".join(lines)

    def lines(self, styled: Styled = _plain) -> list[str]:
        """Return the lines of the table with remedies, and why rules or checks could not judge; many of them are only counted.

        Parameters
        ----------
        styled : callable, optional
            Returns a text with styles such as ``"red"``, for a terminal; by default the text itself.
        """
        table = _table(self, styled) if self else []
        return [*table, self._summary(), *self._reasons(), *([self.note] if self.note else [])]

    def __str__(self) -> str:
        return "\n".join(map(printable, self.lines()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the findings as a table for a notebook."""
        rows = []
        for f in self:
            cells = [html.escape(text) for text in (f.severity, f.rule, f.place, "" if f.step is None else str(f.step))]
            cells[0] = f'<span style="color:{_HTML_COLOURS[f.severity]}">&#9679;</span> {cells[0]}'
            text = f'<td style="text-align:left">{html.escape(f.message)}<br>{details_html(f)}</td>'
            rows.append("<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + text + "</tr>")
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in _HEADER)
        table = f"<table><tr>{head}</tr>{''.join(rows)}</table>" if rows else ""
        more = "<br>".join(html.escape(line.strip()) for line in self._reasons(most=len(self.skipped)))
        reasons = f"<details><summary>{html.escape(self._summary())}</summary>{more}</details>"
        return table + (reasons if more else f"<p>{html.escape(self._summary())}</p>")

    def _reasons(self, most: int = _NAMED) -> list[str]:
        """Return why rules or checks could not judge; those with the same reason share an entry, which names up to `most` of them."""
        names: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            names.setdefault(reason, []).append(name)
        width = max(shutil.get_terminal_size((120, 24)).columns, 40)
        entries = (
            f"{', '.join(group) if len(group) <= most else f'{len(group)} of them'}: {reason}"
            for reason, group in names.items()
        )
        return [
            line
            for entry in entries
            for line in textwrap.wrap(
                entry,
                width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]

    def _summary(self) -> str:
        counts = Counter(finding.severity for finding in self)
        found = ", ".join(_count(counts[severity], severity) for severity in reversed(SEVERITIES) if counts[severity])
        judged = f"{_count(len(self.judged), 'check')} judged"
        skipped = f", {len(self.skipped)} could not:" if self.skipped else ""
        return f"{found or 'no findings'}; {judged}{skipped}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 and noun != 'info' else ''}"


def details_html(finding: Finding) -> str:
    """Return the details of a finding and its curve as HTML, each on a line of its own."""
    lines = [f"<b>{html.escape(label)}:</b> {html.escape(text)}." for label, text in finding.details()]
    if caption := finding.curve_caption():
        curve = svg_sparkline(np.array([value for _, value in finding.curve()]))
        lines.insert(finding.value is not None, f"<b>Curve:</b> {curve} {html.escape(caption)}.")
    return "<br>".join(lines)


_HEADER = ("severity", "rule", "module", "step", "finding")


def _table(findings: Iterable[Finding], styled: Styled) -> list[str]:
    header = _HEADER
    rows = [
        (f.severity, f.rule, printable(f.place or "-"), "-" if f.step is None else str(f.step), f) for f in findings
    ]
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(4)]
    indent = sum(widths) + 2 * len(widths)
    width = max(shutil.get_terminal_size((120, 24)).columns - indent, 40)

    def line(cells: Iterable[str], text: str) -> str:
        return "  ".join((*(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)), text))

    lines = [line(header[:4], header[4]), line(["-" * size for size in widths], "-" * len(header[4]))]
    for severity, rule, module, step, finding in rows:
        texts = [part for text in (finding.message, *finding.lines()) for part in textwrap.wrap(text, width)]
        first = line((severity, rule, module, step), texts[0] if texts else "")
        lines.append(styled(severity, *STYLES[severity]) + first[len(severity) :])
        lines += [" " * indent + text for text in texts[1:]]
    return lines


_STATES = 200  # of which the earliest can be restored


class FindingList:
    """The findings so far, one for each cause.

    A further finding of a rule adds its module, or the step at which it is seen again, to the finding of that rule.
    A finding of a rule that another finding explains becomes a consequence of that finding, which has the highest of their severities.
    A mistake that shows at step 0, before the first update, is not a consequence of one that begins later.

    Parameters
    ----------
    explains : mapping of str to collection of str
        For each rule the rules whose findings it explains.

    Attributes
    ----------
    causes : dict of str to Finding
        The findings by their rules; another object after each change.

    Examples
    --------
    >>> found = FindingList({"dead_units": frozenset({"no_learning"})})
    >>> found.add(Finding("no_learning", "warning", "The loss does not fall."))
    True
    >>> found.add(Finding("dead_units", "warning", "All units are dead.", "fc1"))
    True
    >>> found.add(Finding("dead_units", "warning", "All units are dead.", "fc2"))
    False
    >>> [(finding.rule, finding.modules, finding.consequences) for finding in found]
    [('dead_units', ('fc1', 'fc2'), ('no_learning',))]
    """

    def __init__(self, explains: Mapping[str, Collection[str]]) -> None:
        self._explains = explains
        self.causes: dict[str, Finding] = {}
        self._folded: dict[str, str] = {}  # rule → the rule that explains it
        self._states: deque[tuple[int, dict[str, Finding], dict[str, str]]] = deque(maxlen=_STATES)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.causes.values())

    def __len__(self) -> int:
        return len(self.causes)

    def end(self, rule: str, step: int) -> None:
        """Set the step at which a rule does not see its mistake any more."""
        known = self.causes.get(rule)
        if known is not None and known.ended is None:
            self.causes = {**self.causes, rule: replace(known, ended=step)}
            self._keep(step)

    def aggravate(self, rule: str, severity: str, step: int) -> Finding | None:
        """Raise the severity of the cause that a rule is, or is a consequence of; return the cause if that changes it."""
        cause = self._folded.get(rule, rule)
        known = self.causes.get(cause)
        if known is None or _graver(known.severity, severity) == known.severity:
            return None
        self.causes = {**self.causes, cause: replace(known, severity=severity, against=())}
        self._keep(step)
        return self.causes[cause]

    def as_grave(self, finding: Finding) -> Finding:
        """Return a new finding with the severity of the cause that it is, which is that of its gravest consequence."""
        severity = _graver(finding.severity, self.causes[finding.rule].severity)
        return finding if severity == finding.severity else replace(finding, severity=severity, against=())

    def retract(self, step: int) -> None:
        """Restore the findings before a step, to which the training has gone back."""
        while self._states and self._states[-1][0] >= step:
            self._states.pop()
        self.causes, self._folded = self._states[-1][1:] if self._states else ({}, {})

    def _keep(self, step: int) -> None:
        if self._states and self._states[-1][0] == step:
            self._states.pop()
        self._states.append((step, self.causes, self._folded))

    def add(self, finding: Finding, step: int = 0) -> bool:
        """Add a finding of a judged step; return whether it is a new cause."""
        before = self.causes
        self.causes, self._folded = dict(before), dict(self._folded)
        is_new = self._add(finding)
        if self.causes == before:
            self.causes = before
        else:
            self._keep(step)
        return is_new

    def _add(self, finding: Finding) -> bool:
        rule = finding.rule
        if rule in self.causes:
            return self._join(finding)
        if (cause := self._folded.get(rule)) is not None:
            known = self.causes[cause]
            self.causes[cause] = replace(known, severity=_graver(known.severity, finding.severity))
            return False
        if (cause := self._cause_of(finding)) is not None:
            self._fold(rule, cause, finding.severity)
            return False
        self.causes[rule] = finding
        explained = self._explains.get(rule, ())
        for other, known in [*self.causes.items()]:
            if other != rule and other in explained and _can_cause(finding, known):
                self._demote(other, rule)
        return True

    def _cause_of(self, finding: Finding) -> str | None:
        """Return the rule of the cause that explains a finding, directly or through one of its consequences."""
        direct = ((cause, cause) for cause in self.causes)
        for rule, cause in (*direct, *self._folded.items()):
            if finding.rule in self._explains.get(rule, ()) and _can_cause(self.causes[cause], finding):
                return cause
        return None

    def _join(self, finding: Finding) -> bool:
        """Add a further finding of a rule; a graver one of the same module takes the place of the known one, and is new."""
        known = self.causes[finding.rule]
        modules = known.modules or ((known.module,) if known.module else ())
        is_graver = SEVERITIES.index(finding.severity) > SEVERITIES.index(known.severity)
        is_graver = is_graver and finding.module == known.module
        if is_graver:
            known = replace(finding, modules=known.modules, consequences=known.consequences)
        if finding.module and finding.module not in modules:
            known = replace(known, modules=(*modules, finding.module))
        elif finding.step is not None and finding.step not in (known.step, *known.again):
            known = replace(known, again=(*known.again, finding.step)[-LATER_STEPS:])
        self.causes[finding.rule] = replace(known, ended=None)
        return is_graver

    def _fold(self, rule: str, cause: str, severity: str) -> None:
        self._folded[rule] = cause
        known = self.causes[cause]
        consequences, severity = (*known.consequences, rule), _graver(known.severity, severity)
        self.causes[cause] = replace(known, consequences=consequences, severity=severity)

    def _demote(self, rule: str, cause: str) -> None:
        """Make a cause a consequence of another one, with all of its own consequences."""
        demoted = self.causes.pop(rule)
        for name in (rule, *demoted.consequences):
            self._fold(name, cause, demoted.severity)


def _graver(*severities: str) -> str:
    return max(severities, key=SEVERITIES.index)


def _can_cause(cause: Finding, finding: Finding) -> bool:
    """Return whether a mistake could have caused another one, by the steps at which they begin."""
    return finding.step != 0 or not cause.step
