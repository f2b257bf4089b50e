"""The result of a diagnosis, which prints as a table."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping

from ikkuna.diagnosis.finding import SEVERITIES, Finding

__all__ = ["Findings"]


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

    Examples
    --------
    >>> found = Findings([Finding("dead_units", "warning", "All units are dead.", "fc1", advice="lower the bias")],
    ...                  judged=["dead_units"], skipped={"loss_at_init": "no loss was given"})
    >>> print(found)
    severity  rule        module  finding
    --------  ----------  ------  -------
    warning   dead_units  fc1     All units are dead.
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

    def __new__(
        cls,
        findings: Iterable[Finding] = (),
        judged: Iterable[str] = (),
        skipped: Mapping[str, str] | None = None,
        needed: Mapping[str, str] | None = None,
    ) -> "Findings":
        """Sort `findings` by their severity."""
        ordered = sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
        self = super().__new__(cls, ordered)
        self.judged = tuple(judged)
        self.skipped = dict(skipped or {})
        self.needed = dict(needed or {})
        return self

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of the severity ``error``."""
        return tuple(finding for finding in self if finding.severity == "error")

    def as_markdown(self) -> str:
        """Return the findings as a table in Markdown, for pages of text."""
        lines = ["| severity | rule | module | since step | finding | what to try |", "|:--|:--|:--|--:|:--|:--|"]
        for f in self:
            modules = ", ".join(f"`{name}`" for name in f.modules or ((f.module,) if f.module else ()))
            cells = (f.severity, f.rule, modules, "" if f.step is None else str(f.step), f.message, f.advice)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [*(_table(self) if self else []), self._summary()]
        return "\n".join([*lines, *self._reasons()])

    __repr__ = __str__

    def _reasons(self) -> list[str]:
        """Return why rules or checks could not judge; those with the same reason share an entry."""
        names: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            names.setdefault(reason, []).append(name)
        width = max(shutil.get_terminal_size((120, 24)).columns, 40)
        entries = (f"{', '.join(group)}: {reason}" for reason, group in names.items())
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


def _table(findings: Iterable[Finding]) -> list[str]:
    header = ("severity", "rule", "module", "finding")
    rows = [(f.severity, f.rule, f.module or "-", f) for f in findings]
    widths = [max(len(str(row[i])) for row in (header, *rows)) for i in range(3)]
    indent = sum(widths) + 2 * len(widths)
    width = max(shutil.get_terminal_size((120, 24)).columns - indent, 40)

    def line(cells: Iterable[str], text: str) -> str:
        return "  ".join((*(cell.ljust(size) for cell, size in zip(cells, widths, strict=True)), text))

    lines = [line(header[:3], header[3]), line(["-" * size for size in widths], "-" * len(header[3]))]
    for severity, rule, module, finding in rows:
        advice = f"Try: {finding.advice.rstrip('.')}." if finding.advice else ""
        explained = f"It also explains: {', '.join(finding.consequences)}." if finding.consequences else ""
        texts = [part for text in (finding.message, explained, advice) for part in textwrap.wrap(text, width)]
        lines.append(line((severity, rule, module), texts[0] if texts else ""))
        lines += [" " * indent + text for text in texts[1:]]
    return lines
