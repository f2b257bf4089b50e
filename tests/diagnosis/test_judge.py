"""A judge applies rules step by step: patience, hysteresis, folding, restarts, and rules that fail."""

import contextlib
import json
import logging
import math
import random
import re
from functools import partial
from itertools import takewhile
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ikkuna_subscribers.rules.gradients import GradientJumpRule
from ikkuna_subscribers.rules.loss import LossSpikeRule

from ikkuna.diagnosis import Finding, History, Judge, Network, Rule, Score, get_rules
from ikkuna.diagnosis.check import _judge_session, _shown_sessions, check, findings_of, judge_again
from ikkuna.diagnosis.findings import FindingList
from ikkuna.diagnosis.history import GRADIENTS
from ikkuna.diagnosis.judge import LOSS_BETWEEN, Alarm
from ikkuna.diagnosis.mistakes import EXPLAINS, LOSS_FLOOR, UNBOUNDED_LOSS
from ikkuna.diagnosis.stored_values import RuleValuesFormat, ValueGroup
from ikkuna.errors import ConfigError, ConfigTypeError, PluginError
from ikkuna.metrics.live_rules import RuleSubscriber
from ikkuna.metrics.messages.batch import StepLosses
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.store import read_run
from ikkuna.store.names import SeriesGroup
from ikkuna.store.values import ModuleEntry
from tests.export.storm import Storm

NETWORK = Network([ModuleEntry(name, "Linear", (("weight", (4, 4)),)) for name in ("a", "b", "c")])


class AboveRule(Rule):
    """A value is above a limit."""

    name, needs, thresholds, meaning = (
        "above",
        {"figure": "SomeSubscriber()"},
        ("limit",),
        "It is {figure:g} in {module}.",
    )
    limit = 1.0

    def scores(self, history):
        for name, curve in history.fresh("figure"):
            yield Score(curve.last / self.limit, curve.last, name or None)


def judged(rules, values, network=NETWORK, kind="figure"):
    """Return a judge that has seen ``values``: for each step a dict from names to values."""
    judge = Judge(rules, network)
    for step, named in enumerate(values):
        for name, value in named.items():
            judge.add(kind, name, step, value)
        judge.finish_step(step)
    return judge


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([2.0, 2.0], []),  # shorter than the patience
        ([2.0, 2.0, 2.0], [0]),
        ([0.0, 2.0, 2.0, 0.9, 2.0, 2.0, 2.0], [4]),  # one good value begins the count again
        ([math.nan, 2.0, 2.0, math.nan, 2.0, 2.0], []),  # NaN is not bad
        ([2.0, 2.0, 2.0, 0.9, 0.9, 0.9, 2.0, 2.0, 2.0], [0]),
    ],
)
def test_a_score_must_be_bad_for_as_many_judgements_as_the_patience(values, steps):
    judge = judged([AboveRule(patience=3)], [{"a": value} for value in values])
    assert [finding.step for finding in judge.findings] == steps


@pytest.mark.parametrize("add", ["add", "defer"])
def test_each_of_several_spikes_is_noticed_also_within_the_stride_of_the_rule(add):
    spikes = (70, 73, 74, 120, 131)
    judge = Judge(get_rules(["loss_spike"]), NETWORK)
    announced = []
    for step in range(140):
        loss = 4.0 + step / 10 if step in spikes else 1 + 0.01 * (step * 7 % 10)
        getattr(judge, add)("loss", None, step, loss)
        announced += judge.finish_step(step)
    [finding] = judge.findings
    assert [each.step for each in announced] == [finding.step] == [70]
    assert finding.again == (73, 120, 131)  # 74 belongs to 73
    assert "Again: at steps 73, 120, 131." in finding.lines()


def test_the_last_steps_at_which_a_mistake_began_again_are_kept():
    judge = judged([AboveRule(patience=1)], [{"a": 2.0 * (step % 2), "b": 2.0 * (step == 4)} for step in range(40)])
    [finding] = judge.findings
    assert (finding.step, finding.modules, finding.again) == (1, ("a", "b"), tuple(range(17, 40, 2)))


def test_a_mistake_is_announced_once_and_each_further_module_joins_it():
    judge = Judge([AboveRule(patience=1)], NETWORK)
    announced = []
    for step, names in enumerate(["b", "b", "bc", "abc"]):
        for name in names:
            judge.add("figure", name, step, 5.0)
        announced += judge.finish_step(step)
    assert [(finding.module, finding.step) for finding in announced] == [("b", 0)]
    assert [finding.modules for finding in judge.findings] == [("b", "c", "a")]


@pytest.mark.parametrize(("origin", "module"), [("first", "a"), ("last", "c"), ("worst", "b")])
def test_a_finding_names_the_module_that_the_rule_asks_for(origin, module):
    rule = type("OriginRule", (AboveRule,), {"origin": origin})(patience=1)
    assert judged([rule], [{"a": 2.0, "b": 9.0, "c": 3.0}]).findings[0].module == module


def test_the_finding_has_figure_evidence_and_a_sentence():
    judge = judged([AboveRule(patience=2)], [{"a": 0.5}, {"a": 2.0}, {"a": 3.0}])
    (finding,) = judge.findings
    assert (finding.step, finding.value, finding.kind) == (1, 3.0, "figure")
    assert finding.message == "It is 3 in a."
    assert finding.evidence == ((0, 0.5), (1, 2.0), (2, 3.0))


@pytest.mark.parametrize("advice", ["", "Do this."])
@pytest.mark.parametrize("modules", [("b",), ("a", "b"), ("a", "b", "c"), (None,), ("unknown",)])
def test_a_finding_has_all_facts_of_rule_score_and_module(modules, advice):
    class TestedRule(AboveRule):
        version, advice = 7, "Do that."

        def scores(self, history):
            for module in modules:
                yield Score(2.5, 5, module, detail=f"Also {module}.", advice=advice)

    entries = [ModuleEntry(name, f"{name.upper()}Class", (), (), f"{name}.py:1") for name in "abc"]
    judge = Judge([TestedRule(patience=1, severity="error", limit=2.0)], Network(entries))
    for step in range(3):
        judge.add_all("figure", modules, step, [step + i for i in range(len(modules))])
    (found,) = judge.finish_step(4)
    first, known = modules[0], modules[0] in ("a", "b")
    assert found == Finding(
        rule="above",
        severity="error",
        message=f"It is 5 in {first}. Also {first}.",
        module=first,
        kind="figure",
        step=4,
        value=5.0,
        advice=advice or "Do that.",
        evidence=((0, 0.0), (1, 1.0), (2, 2.0)),
        modules=modules if len(modules) > 1 else (),
        version=7,
        limits=(-math.inf, 2.0),
        class_name=f"{first.upper()}Class" if known else "",
        source=f"{first}.py:1" if known else "",
    )
    assert isinstance(found.value, float)
    assert list(judge.findings) == [found]


@pytest.mark.parametrize(("module", "facts"), [("b", ("BClass", "b.py:1")), ("unknown", ("", "")), (None, ("", ""))])
def test_a_finding_of_a_check_gets_its_step_and_module_and_is_returned_if_it_is_new(module, facts):
    judge = Judge([AboveRule()], Network([ModuleEntry("b", "BClass", (), (), "b.py:1")]))
    added = judge.add_finding(Finding("checked", "error", "It is wrong.", module), 3)
    assert added == Finding("checked", "error", "It is wrong.", module, step=3, class_name=facts[0], source=facts[1])
    assert judge.add_finding(Finding("checked", "error", "It is wrong.", "c"), 4) is None
    assert [finding.modules for finding in judge.findings] == [(module, "c") if module else ("c",)]


@pytest.mark.parametrize(("maximize", "rules"), [(0.0, ["unbounded_loss", "loss_floor"]), (1.0, ["loss_floor"])])
def test_a_mistake_of_a_minimum_is_dropped_if_an_optimizer_maximises_the_loss(maximize, rules):
    judge = Judge(get_rules("unbounded_loss"))
    judge.defer("optimizer_maximize", None, 0, maximize)
    for mistake in (UNBOUNDED_LOSS, LOSS_FLOOR):
        judge.add_finding(mistake.found(1.0), 0)
    assert [finding.rule for finding in judge.findings] == rules


def test_a_consequence_is_folded_into_its_cause_whichever_comes_first():
    explains = {"cause": frozenset({"effect"}), "effect": frozenset({"end"})}
    for order in (["cause", "effect", "end"], ["effect", "end", "cause"], ["end", "effect", "cause"]):
        found = FindingList(explains)
        for name in order:
            found.add(Finding(name, "warning", ""))
        (finding,) = found
        assert finding.rule == "cause"
        assert set(finding.consequences) == {"effect", "end"}


def test_a_cause_is_announced_as_grave_as_what_it_explains():
    effect = type("EffectRule", (AboveRule,), {"name": "effect"})(patience=1, severity="error")
    cause = type("CauseRule", (AboveRule,), {"name": "cause", "explains": frozenset({"effect"})})
    judge = Judge([effect, cause(patience=2, severity="info")], NETWORK)
    announced = []
    for step in range(2):
        judge.add("figure", "a", step, 5.0)
        announced += judge.finish_step(step)
    assert [(finding.rule, finding.severity) for finding in announced] == [("effect", "error"), ("cause", "error")]
    assert [(finding.rule, finding.severity) for finding in judge.findings] == [("cause", "error")]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("steps", "causes"), [((20, 0), {"a", "b"}), ((20, 10), {"a"}), ((0, 0), {"a"}), ((None, 0), {"a"})]
)
def test_a_mistake_before_the_first_update_is_no_consequence_of_a_later_one(order, steps, causes):
    found = FindingList({"a": frozenset({"b"})})
    findings = [Finding(rule, "warning", "", step=step) for rule, step in zip("ab", steps, strict=True)]
    for i in order:
        found.add(findings[i])
    assert {finding.rule for finding in found} == causes


def test_two_rules_that_explain_each_other_leave_one_finding():
    found = FindingList({"a": frozenset({"b"}), "b": frozenset({"a"})})
    assert [found.add(Finding(name, "warning", "")) for name in "abb"] == [True, False, False]
    assert [finding.rule for finding in found] == ["a"]


VALUES = st.sampled_from([0.0, 0.49, 0.5, 0.51, 0.99, 1.0, 3.0, 3.0, 3.0, math.nan])


@example(steps=[{"a": 3.0}, {"a": 0.5}, {"a": 3.0}], patience=1, release=0.5)
@example(steps=[{"a": 3.0}, {"a": 0.49}, {"a": 3.0}], patience=1, release=0.5)
@given(
    steps=st.lists(st.fixed_dictionaries({}, optional={"a": VALUES, "b": VALUES}), max_size=25),
    patience=st.integers(1, 3),
    release=st.sampled_from([0.5, 1.0]),
)
def test_an_alarm_is_raised_and_over_after_patience_judgements_in_a_row(steps, patience, release):
    """The last `patience` scores of a module decide, whatever those of others are."""
    alarm = Alarm(AboveRule(patience=patience, release=release))
    seen, active, judged = {"a": [], "b": []}, set(), 0
    for step, values in enumerate(steps):
        expected = []
        for name, value in values.items():
            seen[name].append((step, value))
            last = [value for _, value in seen[name][-patience:]]
            if name not in active and len(last) == patience and all(value >= 1 for value in last):
                active.add(name)
                in_a_row = takewhile(lambda pair: pair[1] >= 1, reversed(seen[name]))
                expected.append((name, value, min(step for step, _ in in_a_row)))
            elif name in active and not any(value >= release for value in last):
                active.remove(name)
        judged += bool(values)
        raised = alarm.update(step, [Score(value, value, name) for name, value in values.items()])
        assert [(each.score.module, each.score.value, each.since) for each in raised] == expected
        assert alarm.is_over is (judged >= patience and not active)


class CountingRule(AboveRule):
    name = "counting"

    def scores(self, history):
        memory = history.memory[self.name]
        memory["count"] = memory.get("count", 0) + 1
        yield Score(memory["count"] / 4, memory["count"])


def test_an_earlier_step_begins_a_new_history():
    judge = Judge([CountingRule(patience=1)])
    for step in (0, 1, 2, 1, 2, 3):  # three judgements, twice: neither history is long enough
        judge.add("figure", None, step, 1.0)
        judge.finish_step(step)
    assert not judge.findings
    assert judge.history.begin == 1


def test_values_of_another_pass_do_not_begin_a_new_history():
    judge = Judge([CountingRule(patience=1)])
    for step in range(3):
        judge.add("figure", None, step, 1.0)
        judge.finish_step(step)
    judge.add("figure", None, 1, 1.0, "testing")
    assert judge.history.begin == 0


class BrokenRule(AboveRule):
    name = "broken"

    def scores(self, history):
        raise ZeroDivisionError("no number")


class BrokenTextRule(AboveRule):
    """Its text is wrong."""

    name, meaning = "broken_text", "{nothing}"


def test_a_rule_that_raises_does_not_hinder_others_and_is_disabled(caplog):
    with caplog.at_level(logging.ERROR, "ikkuna"):
        judge = judged([BrokenRule(), AboveRule()], [{"a": 2.0}] * 12)
    assert [finding.rule for finding in judge.findings] == ["above"]
    assert judge.findings.skipped["broken"] == "failed: ZeroDivisionError: no number"
    assert sum("rule broken failed" in record.getMessage() for record in caplog.records) == 2  # the 1st and the 10th
    assert sum("disabled" in record.getMessage() for record in caplog.records) == 1


def test_a_rule_that_raises_in_nine_of_ten_judgements_goes_on():
    class OftenBrokenRule(AboveRule):
        def scores(self, history):
            if history.step % 10 != 9:
                raise ZeroDivisionError("no number")
            return super().scores(history)

    assert [f.step for f in judged([OftenBrokenRule(patience=4)], [{"a": 2.0}] * 40).findings] == [9]


@pytest.mark.parametrize(("losses", "severities"), [([2.0] * 12, ["info", "error"]), ([2.0] * 5 + [1.0] * 7, ["info"])])
def test_a_finding_of_the_first_steps_is_as_grave_as_its_rule_once_the_loss_is_known_not_to_fall(losses, severities):
    rule = type("TamedRule", (AboveRule,), {"severity_while_falling": "info"})(patience=1, severity="error")
    judge, announced = Judge([rule], NETWORK), []
    for step, loss in enumerate(losses):
        judge.add("loss", None, step, loss)
        judge.add("figure", "a", step, 2.0)
        announced += judge.finish_step(step)
    assert [finding.severity for finding in announced] == severities
    assert [finding.severity for finding in judge.findings] == severities[-1:]


def test_the_severity_of_a_finding_is_decided_once():
    """The loss falls when ten values are known, and rises afterwards."""
    rule = type("TamedRule", (AboveRule,), {"severity_while_falling": "info"})(patience=1, severity="error")
    judge, announced = Judge([rule], NETWORK), []
    for step in range(60):
        judge.add("loss", None, step, 2.0 - 0.1 * step if step < 20 else 9.0)
        judge.add("figure", "a", step, 2.0)
        announced += [finding.severity for finding in judge.finish_step(step)]
    assert announced == ["info"]
    assert [finding.severity for finding in judge.findings] == ["info"]


def test_a_rule_whose_text_cannot_be_formatted_still_finds(caplog):
    judge = judged([BrokenTextRule(patience=1)], [{"a": 2.0}])
    assert judge.findings[0].message == "Its text is wrong."
    assert judge.findings.skipped == {"broken_text": "failed 1 times, see the log"}
    assert "rule broken_text failed" in caplog.text


@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("count", range(5))
def test_a_rule_has_judged_after_as_many_judgements_with_a_score_as_its_patience(count, patience):
    """Its last judgements have no score: they change nothing, and are no event."""
    judge = judged([AboveRule(patience=patience)], [{"a": 0.0}] * count)
    assert judge.findings.judged == (("above",) if count >= patience else ())
    assert ("above" in judge.findings.skipped) is (count < patience)
    judge.events()
    for step in range(count, count + 2):
        judge.add("figure", "a", step, math.nan, "testing")
        judge.finish_step(step)
        assert judge.findings.judged == (("above",) if count >= patience else ())
        assert not judge.has_changed


@pytest.mark.parametrize(("failures", "reason"), [(1, "1 times"), (9, "9 times"), (10, None), (11, None)])
def test_the_failures_of_a_rule_are_counted_until_it_is_disabled(failures, reason):
    judge = judged([BrokenRule()], [{"a": 2.0}] * failures)
    text = f"failed {reason}, see the log" if reason else "failed: ZeroDivisionError: no number"
    assert judge.findings.skipped == {"broken": text}
    assert list(judge.disabled) == ["broken"] * (reason is None)


def test_what_could_be_judged_is_an_event_whenever_it_changes():
    """A rule with scores, one that fails until it is disabled, and one whose kind comes late."""
    late = type("LateRule", (AboveRule,), {"name": "late", "needs": MappingProxyType({"other": ""})})
    judge, told = Judge([AboveRule(patience=3), BrokenRule(), late(patience=2)], NETWORK), {}
    for step in range(16):
        judge.add("figure", "a", step, 0.0)
        if step > 11:
            judge.add("other", None, step, 0.0)
        judge.finish_step(step)
        told[step] = [
            (e["judged"], "failed:" in e["skipped"]["broken"]) for e in judge.events() if e["event"] == "judged"
        ]
    assert {step: events for step, events in told.items() if events} == {
        0: [((), False)],
        2: [(("above",), False)],
        9: [(("above",), True)],
        13: [(("above", "late"), True)],
    }


@pytest.mark.parametrize("stride", [1, 2, 3, 10])
@pytest.mark.parametrize("way", ["add", "defer"])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_the_first_judgement_is_that_of_the_first_value_and_the_others_follow_the_stride(stride, way, first):
    judge = Judge([type("StrideRule", (PacedRule,), {"stride": stride})()])
    for step in range(first, 25):
        getattr(judge, way)("loss", None, step, 1.0)
        judge.finish_step(step)
    assert judge.rules[0].steps == [*range(first, 25, stride)]


@pytest.mark.parametrize("way", ["add", "defer"])
def test_losses_that_were_never_finite_are_judged_at_once(way):
    judge = Judge([PacedRule()])
    for step in range(4):
        getattr(judge, way)("loss", None, step, math.nan)
        judge.finish_step(step)
    assert judge.rules[0].steps == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["loss", LOSS_BETWEEN])
@pytest.mark.parametrize("way", ["add", "defer"])
def test_a_score_at_the_limit_is_no_spike(kind, way, monkeypatch):
    judge = Judge([PacedRule()])
    for step in range(48):
        judge.add("loss", None, step, 2.0 + 0.01 * (step % 3))
        judge.finish_step(step)
    for loss, is_spike in ((3.0, False), (3.01, True)):
        monkeypatch.setattr("ikkuna.diagnosis.judge.LIMIT", judge.history.scored["loss"].score.of(3.0))
        getattr(judge, way)(kind, None, 48, loss)
        assert judge.is_urgent is is_spike
        judge.finish_step(48)
        assert (48 in judge.history.curve("loss").steps) is (kind == "loss" or is_spike)


def test_a_rule_for_a_kind_that_is_never_published_names_what_it_lacks():
    judge = judged([AboveRule()], [{"a": 1.0}], kind="other")
    assert judge.findings.skipped == {"above": "not measured: figure from SomeSubscriber()"}
    assert judge.findings.needed == {"above": "figure from SomeSubscriber()"}
    assert judge.findings.judged == ()


def test_a_run_that_is_too_short_is_reported():
    findings = judged([AboveRule(patience=5)], [{"a": 1.0}]).findings
    assert "not yet enough" in findings.skipped["above"]
    assert not findings.needed


def test_a_kind_that_is_measured_and_has_no_values_needs_nothing():
    judge = Judge([AboveRule()])
    judge.measured = frozenset({"figure"})
    assert "nothing that they judge" in judge.findings.skipped["above"]
    assert not judge.findings.needed


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"limit": -1}, "AboveRule needs a finite limit > 0, got -1"),
        ({"limit": math.nan}, "got nan"),
        ({"limit": "much"}, "got 'much'"),
        ({"limit": True}, "got True"),
        ({"patience": 0}, "patience >= 1, got 0"),
        ({"patience": 2.5}, "patience >= 1, got 2.5"),
        ({"release": 1.5}, "release <= 1, got 1.5"),
        ({"severity": "fatal"}, "unknown severity 'fatal'"),
        ({"limits": 3}, "did you mean 'limit'"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text.replace("(", "\\(")):
        AboveRule(**settings)


def test_rules_are_found_by_name_and_a_rule_of_the_user_replaces_an_installed_one():
    names = [rule.name for rule in get_rules()]
    assert {"dead_units", "loss_spike", "not_zeroed"} <= set(names)
    assert len(get_rules(["default", AboveRule()])) == len(names) + 1
    mine = type("MineRule", (AboveRule,), {"name": "dead_units"})()
    assert [rule for rule in get_rules(["default", mine]) if rule.name == "dead_units"] == [mine]


@pytest.mark.parametrize(
    ("rules", "error"), [("dead_unit", PluginError), ([AboveRule], ConfigTypeError), ([3], ConfigTypeError)]
)
def test_unknown_rules_are_refused(rules, error):
    with pytest.raises(error):
        get_rules(rules)


def test_two_rules_with_one_name_are_refused():
    with pytest.raises(ConfigError, match="different names"):
        Judge([AboveRule(), AboveRule()])


@pytest.mark.parametrize("rule", get_rules("all"), ids=lambda rule: rule.name)
def test_every_installed_rule_is_documented_and_survives_odd_values(rule):
    """Values that are NaN, infinite, negative, zero or missing raise nothing and, in two steps, find at most what is a fact."""
    text = type(rule).__doc__
    assert "Threshold: " in text
    assert "Cannot see: " in text
    assert rule.meaning
    assert rule.advice
    assert all((*rule.needs.values(), *rule.uses.values()))
    for value in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 5e-324):
        history = History(NETWORK)
        for step in range(3):
            for kind in (*rule.needs, *rule.uses):
                for name in (None, "a", "b", "unknown.7"):
                    history.add(kind, name, step, value)
            for score in rule.scores(history):
                assert isinstance(score.value, float | int)
                rule.describe(score)


@pytest.mark.parametrize("rule", [rule for rule in get_rules("all") if rule.patience > 1], ids=lambda rule: rule.name)
def test_a_rule_waits_as_long_as_its_text_says(rule):
    for number, unit in re.findall(r"(\d+)\s(samples|passes|steps)\sin\sa\srow", type(rule).__doc__):
        assert int(number) == rule.patience * (rule.stride if unit == "steps" else 1)


def test_what_a_rule_explains_is_a_rule_or_a_check():
    names = {*EXPLAINS, *(rule.name for rule in get_rules("all"))}
    unknown = {name for rule in get_rules("all") for name in rule.explains} - names
    assert not unknown


def test_a_curve_keeps_a_bounded_number_of_values():
    judge = Judge([AboveRule()])
    for step in range(3000):
        judge.add("figure", None, step, float(step))
        judge.finish_step(step)
    curve = judge.history.curve("figure")
    assert (len(curve.values), len(curve.first), curve.count) == (400, 20, 3000)


def test_an_interrupt_while_values_are_kept_costs_no_more_than_these():
    storm = Storm()
    for at in range(storm.run(lambda: Judge([AboveRule()]).defer("figure", None, 1, 0.5))):
        judge = Judge([AboveRule()])
        with contextlib.suppress(KeyboardInterrupt):
            storm.run(partial(judge.defer, "figure", None, 1, 0.5), at)
        judge.defer("figure", None, 2, 0.5)
        judge.finish_step(2)
        assert judge.history.curve("figure").kept().pop(2) == 0.5, storm.where


class PacedRule(Rule):
    """Counts its judgements of the loss."""

    name, needs, uses, stride = "paced", {"loss": ""}, {"weights_norm2": ""}, 10
    judged_on = frozenset(("loss",))

    def __init__(self, **settings):
        super().__init__(**settings)
        self.steps = []

    def scores(self, history):
        self.steps.append(history.step)
        yield Score(0.0, 0.0)


def judged_steps(losses, kind="loss", pass_name="training"):
    judge = Judge([PacedRule()])
    judge.add("loss", None, 0, 1.0)
    judge.finish_step(0)
    for step, value in losses.items():
        judge.add(kind, None, step, value, pass_name)
        judge.finish_step(step)
    return judge.rules[0].steps


def test_a_rule_judges_again_after_its_stride():
    assert judged_steps(dict.fromkeys(range(1, 35), 1.0)) == [0, 10, 20, 30]


def test_a_value_that_is_not_finite_or_of_another_pass_is_judged_at_once():
    assert judged_steps({1: 1.0, 2: math.inf, 3: math.nan, 4: 1.0}) == [0, 2, 3]
    assert judged_steps({1: 1.0, 2: 1.0}, pass_name="testing") == [0, 1, 2]


def test_a_kind_that_a_rule_only_reads_causes_no_judgement():
    assert judged_steps(dict.fromkeys(range(1, 35), 1.0), kind="weights_norm2") == [0]


@pytest.mark.parametrize("attributes", [{"stride": 0}, {"stride": True}, {"judged_on": frozenset(("biases_norm2",))}])
def test_a_rule_with_a_wrong_pace_is_refused(attributes):
    with pytest.raises(ConfigError):
        type("WrongRule", (PacedRule,), attributes)()


def test_a_score_can_name_the_step_at_which_the_mistake_began():
    class LateRule(PacedRule):
        """Names an earlier step."""

        patience = 1

        def scores(self, history):
            yield Score(2.0, 2.0, step=history.step - 3)

    judge = Judge([LateRule()])
    judge.add("loss", None, 7, 1.0)
    assert [finding.step for finding in judge.finish_step(7)] == [4]


@pytest.mark.parametrize("every", [7, 10])
def test_deferred_values_give_the_same_findings_at_the_same_steps(every):
    """A loss with a spike, then a NaN, then a resumed run that begins earlier and repeats the spike."""
    steps = [*range(180), *range(90, 150)]
    losses = [(math.nan if step == 160 else 9.0 if step in (123, 124) else 2.0 - 0.001 * step) for step in steps]

    def run(add):
        judge = Judge(get_rules(["loss_spike", "nonfinite", "scaler_skips", "diverges"]), NETWORK)
        announced = []
        for step, loss in zip(steps, losses, strict=True):
            if step % every == 0:
                judge.add_all("weights_norm2", ["a", "b"], step, [1.0, 2.0])
                judge.add("activations_variance", "a", step, 1.0)
                judge.add("weight_gradients_norm2", "a", step, 1.0)
            add(judge)("loss", None, step, loss)
            add(judge)("step_skipped", None, step, 0.0)
            announced += [(step, finding.rule, finding.step) for finding in judge.finish_step(step)]
        return announced, [(*key, list(c.steps), str(list(c.values))) for *key, c in judge.history.all_curves()]

    at_once, later = run(lambda judge: judge.add), run(lambda judge: judge.defer)
    assert {"loss_spike", "nonfinite"} <= {rule for _, rule, _ in at_once[0]}
    assert later[0] == at_once[0]
    assert sorted(later[1]) == sorted(at_once[1])


NUMBERS = st.sampled_from([1.0, 1.01, 1.02, 1.03, 0.5, 5.0, math.nan, math.inf, -math.inf])
MEASURED = st.tuples(st.sampled_from(["figure", "other", "unread"]), st.sampled_from("ab"), NUMBERS)
SEQUENCES = st.lists(st.tuples(NUMBERS, st.lists(MEASURED, max_size=2)), max_size=40)
"""For each step the loss, and what else is measured."""


class KeepingRule(Rule):
    """Stores at which steps it judges, and what it reads there."""

    needs = MappingProxyType({"figure": ""})
    uses = MappingProxyType({"loss": "", "other": ""})

    def __init__(self, name, stride, judged_on, **settings):
        self.name, self.stride, self.judged_on, self.seen = name, stride, judged_on, []
        super().__init__(**settings)

    def scores(self, history):
        curves = [
            (*key, str(list(zip(curve.steps, curve.values, strict=True)))) for *key, curve in history.all_curves()
        ]
        self.seen.append((history.step, sorted(curves, key=str)))
        for name, curve in history.fresh("figure"):
            yield Score(curve.last, curve.last, name)


RULES = st.lists(
    st.tuples(st.integers(1, 4), st.sets(st.sampled_from(["figure", "loss", "other"])), st.integers(1, 2)),
    min_size=1,
    max_size=3,
)


def keeping(rules):
    return [
        KeepingRule(f"rule{i}", stride, frozenset(judged_on), patience=patience)
        for i, (stride, judged_on, patience) in enumerate(rules)
    ]


def judge_all(judge, steps, way, way_of_others="add"):
    """Add the losses of steps in some way, after the other values; return what is announced at each of them."""
    announced = []
    for step, (loss, others) in enumerate(steps):
        for kind, name, value in others:
            getattr(judge, way_of_others)(kind, name, step, value)
        getattr(judge, way)("loss", None, step, loss)
        announced.append([(f.rule, f.module, f.step, f.severity) for f in judge.finish_step(step)])
    return announced


def state_of(judge):
    curves = {tuple(key): str(list(zip(c.steps, c.values, strict=True))) for *key, c in judge.history.all_curves()}
    return [rule.seen for rule in judge.rules], [str(finding.as_dict()) for finding in judge.findings], curves


@settings(max_examples=60)
@given(steps=SEQUENCES, rules=RULES)
def test_rules_judge_the_same_steps_and_read_the_same_whether_values_are_deferred_or_not(steps, rules):
    at_once, later = Judge(keeping(rules), NETWORK), Judge(keeping(rules), NETWORK)
    assert judge_all(at_once, steps, "add") == judge_all(later, steps, "defer")
    assert state_of(at_once)[1:] == state_of(later)[1:]
    assert [[step for step, _ in rule.seen] for rule in at_once.rules] == [
        [step for step, _ in rule.seen] for rule in later.rules
    ]


@settings(max_examples=60)
@given(before=SEQUENCES, after=SEQUENCES, rules=RULES, way=st.sampled_from(["add", "defer"]))
def test_a_judge_that_goes_back_to_the_beginning_is_as_a_new_one(before, after, rules, way):
    judge, fresh = Judge(keeping(rules), NETWORK), Judge(keeping(rules), NETWORK)
    after = [(1.0, [(kind, "a", 0.5) for kind in ("figure", "other")]), *after]
    judge_all(judge, before, way)
    judge.rewind(0)
    for rule in judge.rules:
        rule.seen.clear()
    assert judge_all(judge, after, way, way) == judge_all(fresh, after, way, way)
    assert state_of(judge) == state_of(fresh)


@pytest.mark.parametrize("way", ["add", "defer"])
def test_a_judge_that_goes_back_forgets_values_that_were_deferred(way):
    judge = Judge([PacedRule()])
    for step in range(36):
        getattr(judge, way)("loss", None, step, 1.0)
        judge.finish_step(step)
    judge.rewind(30)
    getattr(judge, way)("loss", None, 40, 2.0)
    judge.finish_step(40)
    assert list(judge.history.curve("loss").steps) == [40]


def test_a_judge_that_goes_back_forgets_which_severities_are_undecided():
    """Before, the loss had too few values; afterwards the score bounds the severity."""

    class BoundedRule(AboveRule):
        severity_while_falling = "info"
        at_most = "error"

        def scores(self, history):
            yield Score(2.0, 2.0, "a", at_most=self.at_most)

    judge = Judge([rule := BoundedRule(patience=1, severity="error")], NETWORK)
    for rule.at_most, steps in (("error", 3), ("info", 20)):
        judge.rewind(0)
        for step in range(steps):
            judge.add("loss", None, step, 2.0)
            judge.add("figure", "a", step, 2.0)
            judge.finish_step(step)
        assert [finding.severity for finding in judge.findings] == ["info"]


def test_there_are_events_if_and_only_if_something_has_changed():
    judge, kinds = Judge([AboveRule(patience=2)], NETWORK), []
    assert judge.has_changed
    for step, value in enumerate([0.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 2.0, 2.0]):
        judge.add("figure", "a", step, value)
        judge.finish_step(step)
        has_changed = judge.has_changed
        kinds.append([event["event"] for event in judge.events()])
        assert has_changed is bool(kinds[-1])
        assert not judge.has_changed
        assert judge.events() == []
    assert sum(map(bool, kinds)) < len(kinds)
    assert len([kind for events in kinds for kind in events if kind != "judged"]) >= 1


def ends(judge, values, first=0):
    """Add a figure of `a` for each step, and return since when the finding has ended after each of them."""
    found = []
    for step, value in enumerate(values, first):
        judge.add("figure", "a", step, value)
        judge.finish_step(step)
        found.append([finding.ended for finding in judge.findings])
    return found


def test_a_finding_ends_after_as_many_good_judgements_as_its_patience():
    judge = Judge([AboveRule(patience=3)], NETWORK)
    assert ends(judge, [2.0, 2.0, 2.0, 2.0, 0.1, 0.1, 0.1, 0.1]) == [[]] * 2 + [[None]] * 4 + [[6]] * 2


def test_a_finding_from_before_a_restart_ends_once_the_new_history_is_long_enough():
    judge = Judge([AboveRule(patience=3)], NETWORK)
    ends(judge, [2.0] * 9)
    assert ends(judge, [0.1] * 4, first=5) == [[None], [None], [7], [7]]


def test_a_finding_of_a_check_is_ended_by_no_rule():
    judge = Judge([AboveRule(patience=1)], NETWORK)
    judge.add_finding(Finding("a_check", "error", "It is wrong.", "a"), 0)
    assert ends(judge, [0.1] * 3) == [[None]] * 3


@pytest.mark.parametrize(
    ("module", "evidence"), [("c", ((0, 7.0),)), ("b", ((0, 5.0),)), ("a", ((0, 5.0),)), (None, ((0, 5.0),))]
)
def test_the_evidence_is_the_curve_of_the_module_or_the_first_one(module, evidence):
    class OfKindRule(AboveRule):
        uses = MappingProxyType({"other": ""})

        def scores(self, history):
            yield Score(2.0, 2.0, module, kind="other")

    judge = Judge([OfKindRule(patience=1)], NETWORK)
    judge.add("other", "c", 0, 7.0)
    judge.add("other", "b", 0, 5.0)
    judge.add("figure", "a", 0, 1.0)
    (finding,) = judge.finish_step(0)
    assert (finding.kind, finding.evidence) == ("other", evidence)


@pytest.mark.parametrize("grave", ["error", "warning"])
@pytest.mark.parametrize(
    ("losses", "at_most", "severity", "against"),
    [
        ([], "error", None, []),
        (
            [2.0] * 3,
            "error",
            "info",
            ["the loss has too few values to tell whether it falls; if it does not, this is "],
        ),
        ([2.0] * 40, "error", None, []),
        ([2.0 * 0.9**step for step in range(40)], "error", "info", ["the loss falls, so this is not yet "]),
        ([2.0] * 40, "info", "info", []),
        ([2.0] * 40, "warning", "warning", []),
    ],
)
def test_the_loss_and_the_score_bound_the_severity_of_a_finding(losses, at_most, severity, against, grave):
    class BoundedRule(AboveRule):
        severity_while_falling = "info"

        def scores(self, history):
            yield Score(2.0, 2.0, "a", at_most=at_most)

    judge = Judge([BoundedRule(patience=1, severity=grave)], NETWORK)
    for step, loss in enumerate(losses):
        judge.add("loss", None, step, loss)
        judge.finish_step(step)
    judge.add("figure", "a", len(losses), 2.0)
    (finding,) = judge.finish_step(len(losses))
    assert finding.severity == (severity or grave)
    assert finding.against == tuple(text + {"error": "an error", "warning": "a warning"}[grave] for text in against)


def test_a_loss_up_to_the_threshold_is_no_spike():
    judge = Judge(get_rules(["loss_spike"]))
    assert judge.threshold_of("loss") == math.inf
    for step in range(48):
        judge.add("loss", None, step, 2.0 + 0.01 * (step % 3))
        judge.finish_step(step)
    assert 2.02 < judge.threshold_of("loss") < 3.0
    judge.add("loss", None, 48, judge.threshold_of("loss") - 1e-9)
    assert not judge.is_urgent
    judge.add("loss", None, 49, judge.threshold_of("loss") * 2)
    assert judge.is_urgent


class Calls:
    """A judge that keeps its calls."""

    def __init__(self):
        self.calls = []

    def add_all(self, kind, names, step, values, pass_name):
        self.calls.append((step, kind))

    def finish_step(self, step):
        self.calls.append((step, "judged"))


def test_values_that_rules_have_read_and_others_that_were_shown_are_judged_step_by_step():
    def values(kind, step):
        return ValueGroup(kind, "training", [None], step, [1.0])

    steps = [(1, [values("read", 1)]), (3, [values("read", 2), values("read", 3)]), (6, [])]
    shown = [values(kind, int(step)) for kind, step in ["x0", "x1", "y1", "x2", "y2", "x3", "x7", "y7", "x8"]]
    _judge_session(calls := Calls(), steps, iter(shown))
    expected = "0x 0judged 1read 1x 1y 1judged 2x 2y 2judged 2read 3read 3x 3judged 6judged 7x 7y 7judged 8x 8judged"
    assert " ".join(f"{step}{kind}" for step, kind in calls.calls) == expected
    for number in range(3):
        _judge_session(calls := Calls(), steps[:number], iter(()))
        assert [step for step, kind in calls.calls if kind == "judged"] == [1, 3][:number]


@pytest.mark.parametrize(
    ("muted", "rules"),
    [
        ([], ["above", "spiked"]),
        (["above"], ["spiked"]),
        (["above:a"], ["spiked"]),
        (["above:b"], ["above", "spiked"]),
    ],
)
def test_muted_findings_are_stored_and_not_returned(muted, rules, tmp_path):
    findings = [Finding("above", "error", "It is wrong.", "a"), Finding("spiked", "info", "It is high.")]
    events = [{"event": "opened", "finding": finding.as_dict(), "step": 0} for finding in findings]
    events.append({"event": "judged", "judged": ["above", "spiked"], "mute": muted, "step": 1})
    (tmp_path / "findings.1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "data.1.jsonl").write_text("")
    run = SimpleNamespace(path=tmp_path)
    assert [finding.rule for finding in findings_of(run)] == rules
    assert [finding.rule for finding in findings_of(run, muted=True)] == ["above", "spiked"]
    assert findings_of(run).note == ("" if len(rules) == 2 else "1 muted finding is not shown; --muted shows them.")


@pytest.mark.parametrize(
    ("value", "steps"), [(2.01, [0, 50]), (90.0, [0, 25, 50]), (math.nan, [0, 25, 50]), (math.inf, [0, 25, 50])]
)
def test_a_loss_between_two_others_is_one_if_it_is_a_spike_or_not_finite(value, steps):
    judge = Judge([PacedRule()])
    for step in range(51):
        kind = "loss" if step % 50 == 0 else LOSS_BETWEEN
        judge.add(kind, None, step, value if step == 25 else 2.0 + 0.01 * (step % 3))
        judge.finish_step(step)
    assert list(judge.history.curve("loss").steps) == steps


def write_run(directory, sessions):
    """Write lists of (kind, pass, module, step, value) as a run whose training was resumed between them."""
    for number, points in enumerate(sessions):
        lines = [
            json.dumps(dict(zip(("kind", "pass", "module", "step", "value"), point, strict=True))) for point in points
        ]
        (directory / f"values.{number}.jsonl").write_text("\n".join(lines) + "\n")


SHOWN = [
    [
        *(("figure", "training", name, step, step + i / 4) for step in range(5) for i, name in enumerate("abc")),
        *(("other", "training", None, step, 2.0 * step) for step in (0, 2, 4)),
        *(("figure", "testing", "a", step, 8.0) for step in (1, 3)),
        *(("unread", "training", "a", step, 8.0) for step in range(5)),
    ],
    [("figure", "training", "a", step, 10.0 + step) for step in range(2, 6)],
]


def test_the_values_of_a_run_are_read_step_by_step_in_its_parts(tmp_path):
    write_run(tmp_path, SHOWN)
    found = []
    for groups in _shown_sessions(read_run(tmp_path), frozenset({"figure", "other"})):
        groups = list(groups)
        assert [group.step for group in groups] == sorted(group.step for group in groups)
        assert len({(*group[:2], group.step) for group in groups}) == len(groups)
        found.append(
            {(g.kind, g.pass_name, name, g.step, v) for g in groups for name, v in zip(g.names, g.values, strict=True)}
        )
    assert found == [{point for point in points if point[0] != "unread"} for points in SHOWN]


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_run_is_judged_again_by_what_rules_read_and_by_what_was_shown_of_other_kinds(is_stored, tmp_path):
    write_run(tmp_path, SHOWN)
    read = RuleValuesFormat()
    if is_stored:
        group, modules = SeriesGroup("figure", ("a",), "training"), [ModuleEntry("a", "Stored", (), (), "a.py:1")]
        parts = [read.header(), read.modules(modules), read.group(group)]
        for step in (0, 1, 2, None, 1, 2):
            value = np.array([100.0 + (step or 0)])
            parts.append(read.resumed(1) if step is None else read.step(step, [(group, value, step)]))
        (tmp_path / read.name("1")).write_bytes(b"".join(parts))
    rule = KeepingRule("above", 1, frozenset(), patience=1)
    (finding,) = judge_again(read_run(tmp_path), [rule])
    last = {"/".join(map(str, curve[:3])): curve[3] for curve in rule.seen[-1][1]}
    if not is_stored:
        assert [step for step, _ in rule.seen] == [0, 1, 2, 3, 4, 2, 3, 4, 5]
        assert last == {"figure/training/a": str([(step, 10.0 + step) for step in range(2, 6)])}
    else:
        assert last == {"figure/training/a": "[(1, 101.0), (2, 102.0)]"}
    assert (finding.module, finding.class_name) == ("a", "Stored" if is_stored else "")


FOUND = [Finding("above", "error", "It is wrong.", "a"), Finding("spiked", "info", "It is high.")]


@pytest.mark.parametrize(
    ("stored", "rules", "muted", "names", "note"),
    [
        (True, None, False, ["spiked"], "1 muted finding is not shown; --muted shows them."),
        (True, None, True, ["above", "spiked"], ""),
        (True, "mine", False, [], "1 muted finding is not shown; --muted shows them."),
        (True, "mine", True, ["above"], ""),
        (False, "mine", False, ["above"], ""),
        (False, None, False, [], "The run has no stored findings: the default rules have judged its values now."),
    ],
)
def test_a_check_returns_what_is_stored_or_what_rules_find_without_what_is_muted(
    stored, rules, muted, names, note, tmp_path
):
    write_run(tmp_path, SHOWN)
    if stored:
        events = [{"event": "opened", "finding": finding.as_dict(), "step": 0} for finding in FOUND]
        events.append({"event": "judged", "judged": ["above", "spiked"], "mute": ["above"], "step": 1})
        (tmp_path / "findings.1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = check(tmp_path, AboveRule(patience=1) if rules else None, muted)
    assert ([finding.rule for finding in found], found.note) == (names, note)
    if not stored and rules is None:
        again = judge_again(read_run(tmp_path), get_rules("default"))
        assert (found.judged, found.skipped, found.needed) == (again.judged, again.skipped, again.needed)
        assert found.skipped
        assert found.needed


class FallingRule(Rule):
    """The loss is above 3, which is grave if it does not fall."""

    name, needs, patience, stride = "above_three", {"loss": ""}, 1, 10
    meaning, severity, severity_while_falling = "The loss is {figure:g}.", "error", "warning"
    judged_on = frozenset(("loss",))

    def scores(self, history):
        curve = history.now("loss")
        if curve is not None:
            yield Score(curve.last / 3, curve.last)


class RateRule(Rule):
    """The rate is not finite."""

    name, needs, patience, stride, meaning = "no_rate", {"learning_rate": ""}, 1, 10, "The rate is {figure:g}."

    def scores(self, history):
        curve = history.now("learning_rate")
        if curve is not None:
            yield Score(0.0 if math.isfinite(curve.last) else 2.0, curve.last)


@pytest.mark.parametrize(
    "rules",
    [
        (FallingRule,),
        (RateRule,),
        (FallingRule, RateRule, LossSpikeRule),
        (GradientJumpRule,),
        (FallingRule, GradientJumpRule),
    ],
)
@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_losses_of_a_block_are_judged_as_those_of_single_steps(seed, every, rules):
    """Values, findings, and the steps at which rules judged do not depend on how many losses come together."""
    choose = random.Random(seed)
    jumps, infinite, unusual = (choose.choice((0, 0.02, 0.1)) for _ in range(3))
    losses = [choose.uniform(1, 1.1) * (choose.choice((3, 40)) if choose.random() < jumps else 1) for _ in range(130)]
    losses = [math.inf if choose.random() < infinite / 5 else loss for loss in losses]
    rates = [[math.nan if choose.random() < unusual / 5 else 0.1 + step // 30] for step in range(130)]
    sizes = [choose.randint(1, 40) for _ in range(130)]
    read = choose.randint(1, 7)
    norms = {
        step: choose.uniform(1, 1.1) * (choose.choice((3, 40)) if choose.random() < jumps else 1)
        for step in range(0, 130, read)
    }

    def state(judge, found):
        curves = {(kind, name): (list(c.steps), list(c.values)) for kind, _, name, c in judge.history.all_curves()}
        return (
            str(curves),
            str({kind: each.latest for kind, each in judge.history.scored.items()}),
            list(map(str, found)),
            str(judge.findings),
            judge.history.begin,
        )

    single, found = Judge([rule() for rule in rules]), []
    for step, loss in enumerate(losses):
        is_read = step % every == 0
        single.defer("loss" if is_read else LOSS_BETWEEN, None, step, loss)
        if is_read:
            single.defer("learning_rate", None, step, rates[step][0])
        if step in norms:
            single.defer(GRADIENTS, None, step, norms[step])
        if is_read or single.is_urgent:
            found += single.finish_step(step)

    together, told = Judge([rule() for rule in rules]), []
    finish = together.finish_step
    together.finish_step = lambda step: told.extend(new := finish(step)) or new
    subscriber = RuleSubscriber(["loss"], together, loss_every=every, backend="null")
    subscriber._store, kept = object(), []
    subscriber._store_steps = lambda stamp: kept.extend(subscriber._judged) or subscriber._judged.clear()
    begin = 0
    for size in sizes:
        block = losses[begin : begin + size]
        if block:
            first, known = Stamp(begin, begin, 0), {i: norms[begin + i] for i in range(size) if begin + i in norms}
            subscriber.compute_losses(
                StepLosses(first, ("0",), losses=block, rates=rates[begin : begin + size], gradients=known)
            )
        begin += size
    assert state(together, told) == state(single, found)
    assert {step for step, _ in kept} >= set(range(0, len(losses), every))
    entries = [entry for _, entries in kept for entry in entries]
    stored = [(at, values.item()) for group, values, at in entries if group.kind in ("loss", LOSS_BETWEEN)]
    assert stored == list(enumerate(losses))[: len(stored)]
    assert len(stored) > (len(losses) - 1) // every * every
    assert {at: values.item() for group, values, at in entries if group.kind == GRADIENTS} == {
        step: norm for step, norm in norms.items() if step < len(stored)
    }
