"""A mistake is declared once: rules and checks refer to it, and add their own thresholds."""

import ast
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from ikkuna.diagnosis import Finding, Rule, Score, get_rules, mistakes
from ikkuna.diagnosis.findings import FindingList
from ikkuna.diagnosis.judge import Judge
from ikkuna.diagnosis.mistakes import EXPLAINS, Mistake
from ikkuna.errors import ConfigError
from ikkuna.store.finding import SEVERITIES

ROOT = Path(__file__).parents[2]
DECLARED = {each.name: each for each in vars(mistakes).values() if isinstance(each, Mistake)}
FIELDS = {field.name for field in fields(Mistake)}
CHECKS = sorted((ROOT / "ikkuna/diagnosis/preflight_checks").glob("*.py"))
RULES = sorted((ROOT / "subscribers/ikkuna_subscribers/rules").glob("*.py"))


def trees(paths):
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def texts_of_rules(field):
    """Yield the values of an attribute that the bodies of rules declare."""
    for tree in trees(RULES):
        for node in tree.body:
            for part in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, ast.Assign) and part.targets[0].id == field:
                    yield ast.literal_eval(part.value)


def calls(paths):
    return [node for tree in trees(paths) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("field", ["name", "meaning", "advice"])
def test_no_text_is_written_in_two_places(field):
    declared = [getattr(each, field) for each in DECLARED.values()]
    overridden = [
        value.value
        for call in calls(CHECKS)
        for keyword in call.keywords
        if keyword.arg == field
        for value in ast.walk(keyword.value)
        if isinstance(value, ast.Constant) and value.value
    ]
    counts = Counter([*declared, *texts_of_rules(field), *dict.fromkeys(overridden)])
    assert len(declared) >= 30
    assert [text for text, count in counts.items() if count > 1] == []


def test_checks_make_findings_of_declared_mistakes_only():
    """A check names no mistake, and a severity only as the highest that its evidence justifies."""
    assert not [call for call in calls(CHECKS) if isinstance(call.func, ast.Name) and call.func.id == "Finding"]
    arguments = [node for call in calls(CHECKS) for node in (*call.args, *call.keywords)]
    strings = {node.value for each in arguments for node in ast.walk(each) if isinstance(node, ast.Constant)}
    assert strings & set(DECLARED) == {"input_scale"}  # the name of the rule that judges the inputs


def test_a_constant_factor_of_the_loss_does_not_explain_a_spike():
    found = FindingList(EXPLAINS)
    assert found.add(Finding("loss_scale", "warning", "The loss is a sum.", step=0))
    assert found.add(Finding("loss_spike", "info", "The loss jumped.", step=113))


def test_a_rule_of_a_declared_mistake_declares_nothing_of_it_again():
    shared = 0
    for tree in trees(RULES):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.keywords:
                assigned = {target.id for part in node.body if isinstance(part, ast.Assign) for target in part.targets}
                assert not assigned & FIELDS, node.name
                shared += 1
    rules = {rule.name: rule for rule in get_rules("all")}
    assert shared == len(rules.keys() & DECLARED.keys()) == 20
    for name in rules.keys() & DECLARED.keys():
        assert {field: getattr(rules[name], field) for field in FIELDS} == vars(DECLARED[name])


def test_what_a_mistake_explains_is_a_mistake():
    known = {*DECLARED, *(rule.name for rule in get_rules("all"))}
    assert not {name for names in EXPLAINS.values() for name in names} - known
    assert {name: each.explains for name, each in DECLARED.items()} == EXPLAINS


@pytest.mark.parametrize("mistake", DECLARED.values(), ids=lambda mistake: mistake.name)
@pytest.mark.parametrize("at_most", SEVERITIES)
def test_an_evidence_can_lower_a_severity_and_not_raise_it(mistake, at_most):
    finding = mistake.found(0.5, "fc", at_most=at_most, detail="More.")
    assert finding.severity == min(mistake.severity, at_most, key=SEVERITIES.index)
    assert (finding.rule, finding.module, finding.advice) == (mistake.name, "fc", mistake.advice)
    assert finding.message.endswith(" More.")
    assert "{" not in finding.message


def test_a_rule_takes_everything_from_its_mistake_and_settings_can_change_the_severity():
    explained = Mistake("effect", "info", meaning="An effect.", advice="wait")
    cause = Mistake(
        "cause", "error", "warning", meaning="It is {figure:g}.", advice="stop", explains=frozenset({"effect"})
    )

    class CauseRule(Rule, mistake=cause):
        needs, patience = {"loss": ""}, 1

        def scores(self, history):
            yield Score(1.0, history.curve("loss").last)

    judge = Judge([CauseRule(severity="info")])
    judge.add("loss", None, 0, 7.0)
    (finding,) = judge.finish_step(0)
    assert (finding.rule, finding.severity, finding.message, finding.advice) == ("cause", "info", "It is 7.", "stop")
    found = FindingList({rule.name: rule.explains for rule in (CauseRule(),)})
    found.add(finding)
    found.add(explained.found())
    assert [each.consequences for each in found] == [("effect",)]


@pytest.mark.parametrize("field", ["severity", "severity_while_falling"])
def test_an_unknown_severity_is_refused(field):
    with pytest.raises(ConfigError, match="bad: unknown severity 'fatal'"):
        Mistake("bad", meaning="", advice="", **{field: "fatal"})
