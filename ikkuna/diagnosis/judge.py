"""Applies rules to the series of a run, one step after another."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, takewhile
from typing import Any, NamedTuple

from ikkuna.diagnosis.findings import FindingList, Findings
from ikkuna.diagnosis.history import GRADIENTS, TRAINING, History, Network
from ikkuna.diagnosis.mistakes import EXPLAINS, OF_MINIMA
from ikkuna.diagnosis.rule import Rule, Score
from ikkuna.diagnosis.stored_findings import changes
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.numerics.spike_score import LIMIT
from ikkuna.store.finding import SEVERITIES, Finding
from ikkuna.support.failures import FailureCounter, error_text, log


@dataclass(slots=True)
class _Place:
    """The state of one module."""

    active: bool = False
    bad: int = 0
    good: int = 0
    since: int = 0


class Raised(NamedTuple):
    """A score that has been bad for long enough.

    Parameters
    ----------
    score : Score
        The latest score.
    since : int
        The step of the first bad score in a row.
    """

    score: Score
    since: int


class Alarm:
    """Counts the bad scores in a row of each module.

    Parameters
    ----------
    rule : Rule
        The rule, with its patience and release.

    Attributes
    ----------
    judged : int
        Number of judgements with a score.

    Examples
    --------
    >>> from ikkuna.diagnosis.rule import Rule
    >>> class AnyRule(Rule):
    ...     name, needs, patience = "any", {"loss": ""}, 2
    ...     def scores(self, history): ...
    >>> alarm = Alarm(AnyRule())
    >>> [len(alarm.update(step, [Score(value, value)])) for step, value in enumerate([2.0, 2.0, 2.0, 0.9, 2.0, 0.1, 0.1, 2.0, 2.0])]
    [0, 1, 0, 0, 0, 0, 0, 0, 1]
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.clear()

    def clear(self) -> None:
        """Forget every module."""
        self._places: dict[str | None, _Place] = {}
        self.judged = 0

    @property
    def is_over(self) -> bool:
        """Whether the mistake lasts in no module, after enough judgements to know that."""
        return self.judged >= self._rule.patience and not any(place.active for place in self._places.values())

    @property
    def is_seen(self) -> bool:
        """Whether the last judgement of a module has seen the mistake."""
        return any(place.bad for place in self._places.values())

    def update(self, step: int, scores: Iterable[Score]) -> list[Raised]:
        """Return the modules whose scores have just been bad for long enough."""
        raised, is_judged = [], False
        for score in scores:
            place = self._places.get(score.module)
            if place is None:
                place = self._places[score.module] = _Place()
            if self._is_raised(place, step if score.step is None else score.step, score.value):
                raised.append(Raised(score, place.since))
            is_judged = True
        self.judged += is_judged
        return raised

    def _is_raised(self, place: _Place, step: int, value: float) -> bool:
        patience = self._rule.patience
        if value >= 1:
            if not place.bad:
                place.since = step
            place.bad += 1
            place.good = 0
        else:
            place.bad = 0
            place.good = place.good + 1 if not value >= self._rule.release else 0
        if place.active:
            place.active = place.good < patience
            return False
        place.active = place.bad >= patience
        return place.active


_MOST_DEFERRED = 1000
_LONG = 100
"""The number of steps after which the last judgement of a rule decides although the rule may judge again."""

LOSS_BETWEEN = "loss_between"
"""The kind of losses between two of those that rules read, as far as they are finite and no spikes."""
_SCORED = {"loss": "loss", LOSS_BETWEEN: "loss", GRADIENTS: GRADIENTS}
"""For each kind whose values are scored, that of those which rules judge."""


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
    errors : int
        Number of exceptions of rules, and of the user's function for findings.
    kinds : frozenset of str
        The kinds that the rules read.
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
        self._deferred: dict[tuple[str, str | None], list[tuple[int, float]]] = {}
        self._count_deferred, self._last_deferred = 0, -1
        self._deferred_kinds: set[str] = set()
        self._deferred_rules: set[Rule] = set()  # that such a kind makes judge
        self._due_at = 0  # the step at which values that were deferred are added
        self.disabled: dict[str, str] = {}
        self.errors = 0
        self.measured: frozenset[str] = frozenset()
        self._alarms = {rule.name: Alarm(rule) for rule in self.rules}
        self._list = FindingList({**EXPLAINS, **{rule.name: rule.explains for rule in self.rules}})
        self._readers: dict[str, tuple[Rule, ...]] = {
            "loss": (),
            LOSS_BETWEEN: (),
        }  # it bounds the severity of every rule
        self._undecided: set[Rule] = set()
        self._judges: dict[str, tuple[Rule, ...]] = {}
        for rule in self.rules:
            for kind in dict.fromkeys((*rule.needs, *rule.uses)):
                self._readers[kind] = (*self._readers.get(kind, ()), rule)
                if not rule.judged_on or kind in rule.judged_on:
                    self._judges[kind] = (*self._judges.get(kind, ()), rule)
        self.kinds = frozenset(self._readers)
        self._judging: dict[frozenset[str], tuple[Rule, ...]] = {}
        self._latest: dict[Rule, int] = {}
        self._changed: set[str] = set()
        self._urgent: set[str] = set()
        self._seen: set[str] = set()
        self._failures = FailureCounter()
        self._has_standing_changed = True
        self._reported: Mapping[str, Finding] = {}

    @property
    def has_changed(self) -> bool:
        """Whether there are :meth:`events`."""
        return self._has_standing_changed or self._list.causes is not self._reported

    def events(self) -> list[dict[str, Any]]:
        """Return how the findings have changed since the last call, as events, see `ikkuna.diagnosis.stored_findings`."""
        found: list[dict[str, Any]] = []
        if self._list.causes is not self._reported:
            found += changes(self._reported, self._list.causes)
            self._reported = self._list.causes
        if self._has_standing_changed:
            self._has_standing_changed = False
            now = self.findings
            found.append({"event": "judged", "judged": now.judged, "skipped": now.skipped, "needed": now.needed})
        return found

    @property
    def history(self) -> History:
        """The series so far."""
        self._flush()
        return self._history

    def add(self, kind: str, name: str | None, step: int, value: float, pass_name: str = TRAINING) -> None:
        """Add a value of a series; a kind that no rule reads is ignored."""
        self.add_all(kind, (name,), step, (value,), pass_name)

    def add_all(
        self, kind: str, names: Sequence[str | None], step: int, values: Sequence[float], pass_name: str = TRAINING
    ) -> None:
        """Add a value to each of several series of a kind; a kind that no rule reads is ignored."""
        if kind not in self._readers:
            return
        if self._deferred:
            self._flush()
        if pass_name == TRAINING and step < self._history.step:
            self.rewind(step)
        is_usual = pass_name == TRAINING and all(map(math.isfinite, values))
        scored = None if names[0] is not None else _SCORED.get(kind)
        if scored is not None and (not is_usual or self._is_spike(scored, step, values[0])):
            kind = scored
        self._history.add_all(kind, names, step, values, pass_name)
        self._changed.add(kind)
        if not is_usual:
            self._urgent.add(kind)

    def defer(self, kind: str, name: str | None, step: int, value: float) -> None:
        """Add a value of a training step, at the latest when a rule judges its kind; a kind that no rule reads is ignored.

        The rules find the same as with :meth:`add`.  It costs less for what has a value in every step.
        """
        if kind not in self._readers:
            return
        if step < max(self._last_deferred, self._history.step) or value - value != 0:
            self.add(kind, name, step, value)
            return
        if name is None and (scored := _SCORED.get(kind)) is not None and self._is_spike(scored, step, value):
            kind = scored
        self._keep(kind, name, (step,), (value,))
        self._last_deferred = step

    def _keep(self, kind: str, name: str | None, steps: Sequence[int], values: Sequence[float]) -> None:
        """Keep values of a series, which are finite, until :meth:`_flush`."""
        self._deferred.setdefault((kind, name), []).extend(zip(steps, values, strict=True))
        self._count_deferred += len(values)

    def defer_losses(self, first: int, losses: Sequence[float], every: int) -> int:
        """Add losses of steps in a row as :meth:`defer` does, up to the first step that is judged; return their number.

        Parameters
        ----------
        first : int
            The first of the steps.
        losses : sequence of float
            At least one.
        every : int
            The number of steps between two losses that rules read.
        """
        due = max(first, 0 if self._undecided or self._changed else self._due_at)
        finite = list(takewhile(math.isfinite, losses[: due + -due % every - first + 1]))
        if not finite or first < max(self._last_deferred, self._history.step):
            self.defer(LOSS_BETWEEN if first % every else "loss", None, first, losses[0])
            return 1
        scores = self._history.scored["loss"].add(range(first, first + len(finite)), finite)
        last = first + len(scores) - 1
        if scores[-1] > LIMIT:
            self._has_spiked("loss", last)
        steps = range(first, last + 1)
        kinds = [
            LOSS_BETWEEN if step % every and not score > LIMIT else "loss"
            for step, score in zip(steps, scores, strict=True)
        ]
        for kind in dict.fromkeys(kinds):
            chosen = [each is kind for each in kinds]
            self._keep(kind, None, [*compress(steps, chosen)], [*compress(finite, chosen)])
        self._last_deferred = last
        return len(scores)

    def defer_all(self, kind: str, name: str | None, values: Sequence[tuple[int, float]]) -> None:
        """Add a series of values, each with its step, among the steps whose losses were deferred; see :meth:`defer`."""
        if kind not in self._readers or not values:
            return
        if not all(math.isfinite(value) for _, value in values):
            for step, value in values:
                self.add(kind, name, step, value)
            return
        self._keep(kind, name, *zip(*values, strict=True))

    def threshold_of(self, kind: str) -> float | None:
        """Only a value of a scored kind that is not at most this can be a spike; ``None`` if no rule reads the kind."""
        return self._history.scored[kind].score.threshold if kind in self._readers else None

    @property
    def is_urgent(self) -> bool:
        """Whether a value was added that is judged at once."""
        return bool(self._urgent)

    def _is_spike(self, kind: str, step: int, value: float) -> bool:
        """Compute the spike score of a value; return whether it is a spike, which is judged at once."""
        is_spike = self._history.scored[kind].add((step,), (value,))[0] > LIMIT
        if is_spike:
            self._has_spiked(kind, step)
        return is_spike

    def _has_spiked(self, kind: str, step: int) -> None:
        """Let a step be judged whose value is a spike."""
        self._due_at = step
        self._urgent.add(kind)

    def _flush(self) -> None:
        """Add the values that were deferred."""
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, {}
        self._count_deferred = 0
        for (kind, name), kept in deferred.items():
            if kept:  # an interrupt has come before the first of them
                self._history.extend(kind, name, *zip(*kept, strict=True))
            self._changed.add(kind)
            if kind not in self._deferred_kinds:
                self._deferred_kinds.add(kind)
                self._deferred_rules.update(self._judges.get(kind, ()))

    def rewind(self, step: int) -> None:
        """Begin a new history at a step, and retract the findings of this step and later ones."""
        self._flush()
        self._list.retract(step)
        self._reported = self._list.causes
        self._history.clear()
        self._last_deferred = -1
        self._latest.clear()
        self._undecided.clear()
        self._due_at = step
        for alarm in self._alarms.values():
            alarm.clear()

    def finish_step(self, step: int) -> list[Finding]:
        """Judge a step after its values have been added; return the new findings, one for each new cause."""
        if self._deferred and (self._undecided or step >= self._due_at or self._count_deferred >= _MOST_DEFERRED):
            self._flush()
        if not self._changed:
            return []
        changed, self._changed = self._changed, set()
        self._seen |= changed
        due = self._due(changed, step)
        next_ones = [self._latest.get(rule, -rule.stride) + rule.stride for rule in self._deferred_rules]
        self._due_at = min(next_ones, default=step + 1)
        if not due:
            return self._decide(due, step)
        new: list[Finding] = []
        raised = [(rule, found) for rule in self.rules if rule in due and (found := self._judge(rule, step))]
        for rule, places in raised:
            new += [finding for finding in self._findings(rule, places) if self._list.add(finding, step)]
        for rule_name, known in self._list.causes.items():
            alarm = self._alarms.get(rule_name)  # a check before the first step has none
            if known.ended is None and alarm is not None and alarm.is_over:
                self._list.end(rule_name, step)
        new += self._decide(due, step)
        return [self._list.as_grave(finding) for finding in new if finding.rule in self._list.causes]

    def add_finding(self, finding: Finding, step: int) -> Finding | None:
        """Add a finding of a check that is not a rule, with its step and its module; return it if it is a new cause."""
        if finding.rule in OF_MINIMA and self.history.is_maximised:
            return None
        entry = self._history.network.entry(finding.module)
        found = replace(
            finding,
            step=step,
            class_name=entry.class_name if entry is not None else "",
            source=entry.source if entry is not None else "",
        )
        return found if self._list.add(found, step) else None

    def _decide(self, judged: set[Rule], step: int) -> list[Finding]:
        """Give findings the severity of their rules once the loss is known not to fall; return those that have become graver.

        A rule must still see its mistake: in this step, or in its last judgement if it has judged once or not for long.
        """
        if not self._undecided or (falls := self._history.loss_falls) is None:
            return []
        graver = []
        for rule in [rule for rule in self.rules if rule in self._undecided]:
            alarm, age = self._alarms[rule.name], step - self._latest.get(rule, step)
            is_seen = alarm.is_seen and (rule in judged or alarm.judged < 2 or age >= _LONG)
            if falls or alarm.is_over or is_seen:
                self._undecided.discard(rule)
            if is_seen and not falls:
                graver.append(self._list.aggravate(rule.name, rule.severity, step))
        return [finding for finding in graver if finding is not None]

    def _severity(self, rule: Rule, score: Score) -> str:
        """Return the severity of a new finding, which the loss and the values of the rule bound."""
        falls = self._history.loss_falls
        if score.at_most != "error":
            return min(rule.severity, score.at_most, key=SEVERITIES.index)
        bounded = min(rule.severity, rule.severity_while_falling, key=SEVERITIES.index)
        if falls is None and self._history.curve("loss") is None:
            return rule.severity
        if falls is None and bounded != rule.severity:
            self._undecided.add(rule)
        return rule.severity if falls is False else bounded

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

    def _judge(self, rule: Rule, step: int) -> list[Raised] | None:
        if rule.name in self.disabled or not self._seen.issuperset(rule.needs):
            return None
        try:
            scores = tuple(rule.scores(self._history))
            found = self._alarms[rule.name].update(step, scores)
        except Exception as error:
            self._report(rule, error)
            return None
        if scores and self._alarms[rule.name].judged == rule.patience:
            self._has_standing_changed = True
        if self._failures.counts:
            self._failures.reset(rule.name)
        return found

    def _report(self, rule: Rule, error: Exception) -> None:
        self.errors += 1
        count = self._failures.add(rule.name)
        if FailureCounter.is_logged(count):
            log.error("rule %s failed (training is not affected)", rule.name, exc_info=error)
        if self._failures.is_exhausted(rule.name):
            self._has_standing_changed = True
            self.disabled[rule.name] = error_text(error)
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
        entry = self._history.network.entry(score.module)
        severity = self._severity(rule, score)
        return Finding(
            rule=rule.name,
            version=rule.version,
            severity=severity,
            message=self._message(rule, score),
            module=score.module,
            kind=kind,
            step=since,
            value=float(score.figure),
            advice=score.advice or rule.advice,
            evidence=curve.points() if curve is not None else (),
            limits=rule.healthy(score),
            class_name=entry.class_name if entry is not None else "",
            source=entry.source if entry is not None else "",
            against=() if severity == rule.severity or score.at_most != "error" else (self._doubt(rule),),
        )

    def _doubt(self, rule: Rule) -> str:
        """Return why the severity of a finding is lower than that of its rule."""
        if self._history.loss_falls:
            return f"the loss falls, so this is not yet {_article(rule.severity)}"
        return (
            f"the loss has too few values to tell whether it falls; if it does not, this is {_article(rule.severity)}"
        )

    def _message(self, rule: Rule, score: Score) -> str:
        try:
            return f"{rule.describe(score)} {score.detail}".strip()
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
        if needed := self._needed(rule):
            return f"not measured: {needed}"
        if count := self._failures.counts.get(rule.name):
            return f"failed {count} times, see the log"
        if self._alarms[rule.name].judged < rule.patience:
            return "the training has nothing that they judge, or not yet enough of it"
        return ""

    def _unmeasured(self, rule: Rule) -> list[str]:
        return [kind for kind in rule.needs if kind not in self._seen and kind not in self.measured]

    def _needed(self, rule: Rule) -> str:
        missing = self._unmeasured(rule)
        sources = dict.fromkeys(rule.needs[kind] for kind in missing if rule.needs[kind])
        return f"{', '.join(missing)}" + (f" from {', '.join(sources)}" if sources else "") if missing else ""


def _article(severity: str) -> str:
    return f"an {severity}" if severity == "error" else f"a {severity}"
