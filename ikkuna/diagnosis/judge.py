"""Applies rules to the series of a run, one step after another."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ikkuna.diagnosis.alarm import Alarm, Raised
from ikkuna.diagnosis.finding import Finding
from ikkuna.diagnosis.findings import Findings
from ikkuna.diagnosis.folding import FindingList
from ikkuna.diagnosis.history import TRAINING, History
from ikkuna.diagnosis.network import Network
from ikkuna.diagnosis.rule import Rule, Score
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.failures import FailureCounter
from ikkuna.logger import log

__all__ = ["Judge"]

_MOST_DEFERRED = 1000


class Judge:
    """Applies rules to the series of a run.

    Values are added in the order of steps, and :meth:`finish_step` is called after those of each step.
    The same calls are made while a model trains and when a finished run is read.
    A step that is not after the step before begins a new history: the run was resumed from an earlier checkpoint.

    A rule that raises an exception does not judge that step; after 10 exceptions in a row it is disabled.

    Parameters
    ----------
    rules : sequence of Rule
        The rules.
    network : Network, optional
        The modules of the network.

    Raises
    ------
    ConfigError
        If two rules have the same name.

    Attributes
    ----------
    disabled : dict of str to str
        The names of the disabled rules, and their last exceptions.
    measured : frozenset of str
        The kinds that are measured as far as the training has anything to measure; empty if only stored values are known.

    Examples
    --------
    >>> class AboveTenRule(Rule):
    ...     '''The loss is above 10.'''
    ...     name, needs, meaning, patience = "above_ten", {"loss": "LossSubscriber()"}, "The loss is {figure:g}.", 2
    ...     def scores(self, history):
    ...         yield Score(history.curve("loss").last / 10, history.curve("loss").last)
    >>> judge = Judge([AboveTenRule()])
    >>> for step, loss in enumerate([1.0, 12.0, 15.0]):
    ...     judge.add("loss", None, step, loss)
    ...     found = judge.finish_step(step)
    >>> print(found[0])
    warning: above_ten at step 1: The loss is 15.
    """

    def __init__(self, rules: Iterable[Rule], network: Network | None = None) -> None:
        self.rules = tuple(rules)
        if wrong := [rule for rule in self.rules if not isinstance(rule, Rule)]:
            raise ConfigTypeError(f"a rule is a Rule, got {type(wrong[0]).__name__}")
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            raise ConfigError(f"rules must have different names, got {names}")
        self._history = History(network)
        self._deferred: list[tuple[str, str | None, int, float]] = []
        self._deferred_kinds: set[str] = set()
        self._due_at = -1
        self.disabled: dict[str, str] = {}
        self.measured: frozenset[str] = frozenset()
        self._alarms = {rule.name: Alarm(rule) for rule in self.rules}
        self._list = FindingList({rule.name: rule.explains for rule in self.rules})
        self._readers: dict[str, tuple[Rule, ...]] = {}
        self._judges: dict[str, tuple[Rule, ...]] = {}
        for rule in self.rules:
            for kind in dict.fromkeys((*rule.needs, *rule.uses)):
                self._readers[kind] = (*self._readers.get(kind, ()), rule)
                if not rule.judged_on or kind in rule.judged_on:
                    self._judges[kind] = (*self._judges.get(kind, ()), rule)
        self._judging: dict[frozenset[str], tuple[Rule, ...]] = {}
        self._latest: dict[Rule, int] = {}
        self._changed: set[str] = set()
        self._urgent: set[str] = set()
        self._seen: set[str] = set()
        self._judged: set[str] = set()
        self._failures = FailureCounter()

    @property
    def history(self) -> History:
        """The series so far."""
        self._flush()
        return self._history

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds that the rules read."""
        return frozenset(self._readers)

    def add(self, kind: str, name: str | None, step: int, value: float, pass_name: str = TRAINING) -> None:
        """Add a value of a series; a kind that no rule reads is ignored."""
        if kind not in self._readers:
            return
        self._flush()
        if pass_name == TRAINING and step < self._history.step:
            self._restart()
        self._history.add(kind, name, step, value, pass_name)
        self._changed.add(kind)
        if value - value != 0 or pass_name != TRAINING:
            self._urgent.add(kind)

    def add_all(
        self, kind: str, names: Sequence[str | None], step: int, values: Sequence[float], pass_name: str = TRAINING
    ) -> None:
        """Add a value to each of several series of a kind; a kind that no rule reads is ignored."""
        if kind not in self._readers:
            return
        self._flush()
        if pass_name == TRAINING and step < self._history.step:
            self._restart()
        self._history.add_all(kind, names, step, values, pass_name)
        self._changed.add(kind)
        if pass_name != TRAINING or not all(map(math.isfinite, values)):
            self._urgent.add(kind)

    def defer(self, kind: str, name: str | None, step: int, value: float) -> None:
        """Add a value of a training step, at the latest when a rule judges its kind; a kind that no rule reads is ignored.

        The rules find the same as with :meth:`add`.  It costs less for what has a value in every step.
        """
        if kind not in self._readers:
            return
        last = self._deferred[-1][2] if self._deferred else self._history.step
        if step < last or value - value != 0:
            self.add(kind, name, step, value)
        else:
            self._deferred.append((kind, name, step, value))

    def _flush(self) -> None:
        """Add the values that were deferred."""
        if not self._deferred:
            return
        values, self._deferred = self._deferred, []
        for kind, name, step, value in values:
            self._history.add(kind, name, step, value)
            self._changed.add(kind)
            self._deferred_kinds.add(kind)

    def _restart(self) -> None:
        self._history.clear()
        self._latest.clear()
        self._due_at = -1
        for alarm in self._alarms.values():
            alarm.clear()

    def finish_step(self, step: int) -> list[Finding]:
        """Judge a step after its values have been added; return the new findings, one for each new cause."""
        if self._deferred and (step >= self._due_at or len(self._deferred) >= _MOST_DEFERRED):
            self._flush()
        if not self._changed:
            return []
        changed, self._changed = self._changed, set()
        self._seen |= changed
        due = self._due(changed, step)
        rules = {rule for kind in self._deferred_kinds for rule in self._judges.get(kind, ())}
        self._due_at = min((self._latest.get(rule, -rule.stride) + rule.stride for rule in rules), default=step + 1)
        if not due:
            return []
        raised = [(rule, found) for rule in self.rules if rule in due and (found := self._judge(rule, step))]
        new = []
        for rule, places in raised:
            new += [finding for finding in self._findings(rule, places) if self._list.add(finding)]
        causes = {finding.rule for finding in self._list}
        return [finding for finding in new if finding.rule in causes]

    def _due(self, changed: set[str], step: int) -> set[Rule]:
        """Return the rules that judge this step."""
        latest = self._latest
        known = self._judging.get(kinds := frozenset(changed))
        if known is None:
            known = self._judging[kinds] = tuple({rule for kind in changed for rule in self._judges.get(kind, ())})
        due = {rule for rule in known if rule.stride == 1 or step - latest.get(rule, -rule.stride) >= rule.stride}
        if self._urgent:
            due.update(rule for kind in self._urgent for rule in self._readers[kind])
            self._urgent.clear()
        for rule in due:
            latest[rule] = step
        return due

    def _judge(self, rule: Rule, step: int) -> list[Raised]:
        if rule.name in self.disabled or not self._seen.issuperset(rule.needs):
            return []
        try:
            scores = tuple(rule.scores(self._history))
            found = self._alarms[rule.name].update(step, scores)
        except Exception as error:
            self._report(rule, error)
            return []
        if scores:
            self._judged.add(rule.name)
        if self._failures.counts:
            self._failures.reset(rule.name)
        return found

    def _report(self, rule: Rule, error: Exception) -> None:
        count = self._failures.add(rule.name)
        if FailureCounter.is_logged(count):
            log.error("rule %s failed (training is not affected)", rule.name, exc_info=error)
        if self._failures.is_exhausted(rule.name):
            self.disabled[rule.name] = f"{type(error).__name__}: {error}"
            log.error("rule %s is disabled after %d failures in a row", rule.name, count)

    def _findings(self, rule: Rule, places: Sequence[Raised]) -> list[Finding]:
        """Return a finding for each place; the first names the origin and lists all of them."""
        network = self._history.network
        ordered = sorted(places, key=lambda place: network.position(place.score.module))
        if rule.origin == "last":
            ordered.reverse()
        elif rule.origin == "worst":
            ordered.sort(key=lambda place: -place.score.value)
        found = [self._finding(rule, place.score, place.since) for place in ordered]
        if len(found) > 1:
            modules = tuple(finding.module for finding in found if finding.module)
            found[0] = replace(found[0], modules=modules)
        return found

    def _finding(self, rule: Rule, score: Score, since: int) -> Finding:
        kind = score.kind or next(iter(rule.needs))
        curve = self._history.curves(kind).get(score.module) or self._history.curve(kind)
        return Finding(
            rule=rule.name,
            severity=rule.severity,
            message=self._message(rule, score),
            module=score.module,
            kind=kind,
            step=since,
            value=float(score.figure),
            advice=rule.advice,
            evidence=curve.points() if curve is not None else (),
        )

    def _message(self, rule: Rule, score: Score) -> str:
        try:
            return rule.describe(score)
        except Exception as error:
            self._report(rule, error)
            return type(rule).__doc__ or rule.name

    # -- results --------------------------------------------------------------------------------------------------

    @property
    def findings(self) -> Findings:
        """The findings so far, with the names of the rules that judged, and why the others could not."""
        unjudged = self.unjudged
        judged = [rule.name for rule in self.rules if rule.name not in unjudged]
        needed = {rule.name: text for rule in self.rules if rule.name in unjudged and (text := self._needed(rule))}
        return Findings(self._list, judged, unjudged, needed)

    @property
    def unjudged(self) -> Mapping[str, str]:
        """The names of the rules that could not judge, and why."""
        reasons = {rule.name: self._reason(rule) for rule in self.rules}
        return {name: reason for name, reason in reasons.items() if reason}

    def _reason(self, rule: Rule) -> str:
        if rule.name in self.disabled:
            return f"failed: {self.disabled[rule.name]}"
        if self._unmeasured(rule):
            return "what they read is not measured; findings.needed names it"
        if count := self._failures.counts.get(rule.name):
            return f"failed {count} times, see the log"
        if rule.name not in self._judged or self._alarms[rule.name].judged < rule.patience:
            return "the training has nothing that they judge, or not yet enough of it"
        return ""

    def _unmeasured(self, rule: Rule) -> list[str]:
        return [kind for kind in rule.needs if kind not in self._seen and kind not in self.measured]

    def _needed(self, rule: Rule) -> str:
        missing = self._unmeasured(rule)
        sources = dict.fromkeys(rule.needs[kind] for kind in missing if rule.needs[kind])
        return f"{', '.join(missing)}" + (f" from {', '.join(sources)}" if sources else "") if missing else ""
