"""Folds findings that have one cause into one finding."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ikkuna.diagnosis.finding import Finding

__all__ = ["FindingList"]


class FindingList:
    """The findings so far, one for each cause.

    A further finding of a rule adds its module to the finding of that rule.
    A finding of a rule that another finding explains becomes a consequence of that finding.
    A mistake that shows at step 0, before the first update, is not a consequence of one that begins later.

    Parameters
    ----------
    explains : mapping of str to frozenset
        For each rule the rules whose findings it explains.

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

    def __init__(self, explains: Mapping[str, frozenset[str]]) -> None:
        self._explains = explains
        self._causes: dict[str, Finding] = {}
        self._folded: dict[str, str] = {}  # rule → the rule that explains it

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._causes.values())

    def __len__(self) -> int:
        return len(self._causes)

    def add(self, finding: Finding) -> bool:
        """Add a finding; return whether it is a new cause."""
        rule = finding.rule
        if rule in self._causes:
            self._join(finding)
            return False
        if rule in self._folded:
            return False
        if (cause := self._cause_of(finding)) is not None:
            self._fold(rule, cause)
            return False
        self._causes[rule] = finding
        explained = self._explains.get(rule, frozenset())
        for other, known in [*self._causes.items()]:
            if other != rule and other in explained and _can_cause(finding, known):
                self._demote(other, rule)
        return True

    def _cause_of(self, finding: Finding) -> str | None:
        """Return the rule of the cause that explains a finding, directly or through one of its consequences."""
        direct = ((cause, cause) for cause in self._causes)
        for rule, cause in (*direct, *self._folded.items()):
            if finding.rule in self._explains.get(rule, ()) and _can_cause(self._causes[cause], finding):
                return cause
        return None

    def _join(self, finding: Finding) -> None:
        known = self._causes[finding.rule]
        modules = known.modules or ((known.module,) if known.module else ())
        if finding.module and finding.module not in modules:
            self._causes[finding.rule] = replace(known, modules=(*modules, finding.module))

    def _fold(self, rule: str, cause: str) -> None:
        self._folded[rule] = cause
        known = self._causes[cause]
        self._causes[cause] = replace(known, consequences=(*known.consequences, rule))

    def _demote(self, rule: str, cause: str) -> None:
        """Make a cause a consequence of another one, with all of its own consequences."""
        demoted = self._causes.pop(rule)
        for name in (rule, *demoted.consequences):
            self._fold(name, cause)


def _can_cause(cause: Finding, finding: Finding) -> bool:
    """Return whether a mistake could have caused another one, by the steps at which they begin."""
    return finding.step != 0 or not cause.step
