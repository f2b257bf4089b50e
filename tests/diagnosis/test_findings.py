"""The list of findings, which folds consequences into their causes, and its tables."""

import math
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikkuna.diagnosis import Finding, Findings
from ikkuna.diagnosis.findings import FindingList, details_html, is_muted
from ikkuna.store.finding import LATER_STEPS, SEVERITIES

RULES = "abcd"
EXPLAINS = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset("d"), "d": frozenset("a")}


def finding(rule, severity="warning", module=None, step=None, **others):
    return Finding(rule, severity, f"{rule} is wrong.", module, step=step, **others)


# -- folding, against what it has to keep

ADDED = st.builds(
    finding,
    st.sampled_from(RULES),
    st.sampled_from(SEVERITIES),
    st.sampled_from([None, "m", "n"]),
    st.sampled_from([None, 0, 1, 2, 5]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), ADDED),
    st.tuples(st.just("end"), st.sampled_from(RULES)),
    st.tuples(st.just("aggravate"), st.tuples(st.sampled_from(RULES), st.sampled_from(SEVERITIES))),
)
STEPS = st.lists(st.lists(ACTIONS, max_size=2), max_size=12)


def apply(found, step, action, argument):
    """Carry out an action of a judged step; return its result."""
    if action == "add":
        return found.add(argument, step)
    return found.end(argument, step) if action == "end" else found.aggravate(*argument, step)


def folded(found):
    """Return the cause of each rule that was found."""
    return {rule: cause.rule for cause in found for rule in (cause.rule, *cause.consequences)}


def check_end(found, causes, rule, step):
    ended = {known: each.ended for known, each in causes.items()}
    if rule in causes and ended[rule] is None:
        ended[rule] = step
    assert {each.rule: each.ended for each in found} == ended


def check_aggravated(found, causes, cause, severity, result):
    if cause is None:
        assert result is None
        return
    known = causes[cause]
    is_graver = SEVERITIES.index(severity) > SEVERITIES.index(known.severity)
    expected = replace(known, severity=severity, against=()) if is_graver else None
    assert (result, found.causes[cause]) == (expected, expected or known)


def check_first(added, causes, was, now, result):
    """Check where a rule that was not found before, and those that it explains, have gone."""
    rule = added.rule
    assert result is (now[rule] == rule)
    explaining = [
        cause for each, cause in was.items() if rule in EXPLAINS[each] and (added.step != 0 or not causes[cause].step)
    ]
    assert (now[rule] in explaining) if explaining else (now[rule] == rule)
    explained = {each for each in EXPLAINS[rule] & causes.keys() if causes[each].step != 0 or not added.step}
    assert {each for each in causes if now[each] != each} == (set() if explaining else explained)


def check_severity(found, causes, added, is_known_cause, now):
    """Check that a cause is as grave as the gravest of what it was and of its consequences."""
    cause = now[added.rule]
    severities = [each.severity for rule, each in causes.items() if now[rule] == cause]
    if not is_known_cause or added.module == causes[cause].module:
        severities.append(added.severity)
    assert found.causes[cause].severity == max(severities, key=SEVERITIES.index)


@settings(max_examples=150)
@given(STEPS)
def test_each_rule_is_one_cause_or_the_consequence_of_one(steps):
    found, modules = FindingList(EXPLAINS), {}
    for step, action, argument in [(step, *each) for step, actions in enumerate(steps) for each in actions]:
        before, causes, was = found.causes, dict(found.causes), folded(found)
        result, now = apply(found, step, action, argument), folded(found)
        assert (found.causes is before) is (found.causes == causes)
        assert before == causes, "the earlier object stays as it is"
        assert len(found) == len(found.causes)
        assert len(now) == sum(1 + len(each.consequences) for each in found), "each rule once"
        assert set(now) == {*was, *([argument.rule] if action == "add" else [])}
        if action == "end":
            check_end(found, causes, argument, step)
        elif action == "aggravate":
            check_aggravated(found, causes, was.get(argument[0]), argument[1], result)
        else:
            known = modules.setdefault(argument.rule, [])
            if argument.rule not in was:
                check_first(argument, causes, was, now, result)
            check_severity(found, causes, argument, was.get(argument.rule) == argument.rule, now)
            if argument.module and argument.module not in known and was.get(argument.rule) in (None, argument.rule):
                known.append(argument.module)
            for each in found:
                assert [*(each.modules or filter(None, [each.module]))] == modules[each.rule]


@given(steps=STEPS, step=st.integers(0, 12))
def test_a_training_that_goes_back_has_the_findings_before_that_step(steps, step):
    whole, part = FindingList(EXPLAINS), FindingList(EXPLAINS)
    for number, actions in enumerate(steps):
        for action, argument in actions:
            apply(whole, number, action, argument)
            if number < step:
                apply(part, number, action, argument)
    whole.retract(step)
    assert list(whole) == list(part)
    for rule in RULES:
        assert whole.add(finding(rule), 20) is part.add(finding(rule), 20)
    assert list(whole) == list(part)


def test_an_end_and_a_severity_are_taken_back_with_their_steps():
    found, seen = FindingList({}), []
    found.add(finding("rule", "info"), 1)
    found.end("rule", 5)
    found.aggravate("rule", "error", 7)
    for step in (8, 7, 5, 1):
        found.retract(step)
        seen.append([(each.ended, each.severity) for each in found])
    assert seen == [[(5, "error")], [(5, "info")], [(None, "info")], []]


def test_only_the_last_200_changes_can_be_taken_back():
    found = FindingList({})
    for step in range(250):
        found.add(finding(f"rule{step}"), step)
    found.retract(51)
    assert [each.rule for each in found] == [f"rule{step}" for step in range(51)]
    found.retract(50)
    assert list(found) == []


def test_changes_in_one_step_are_one_change_that_can_be_taken_back():
    found = FindingList({})
    for i in range(600):
        found.add(finding(f"rule{i}"), i // 3)
    found.retract(1)
    assert [each.rule for each in found] == ["rule0", "rule1", "rule2"]


def test_a_further_finding_of_a_rule_names_its_module_or_its_step():
    found = FindingList({})
    known = finding("a", "warning", "m", 3, against=("it falls",))
    assert found.add(known, 3)
    added = [
        (finding("a", "info", "m", 3), {}),
        (finding("a", "info", "m", None), {}),
        (finding("a", "info", "m", 7), {"again": (7,)}),
        (finding("a", "error", "n", 8), {"again": (7,), "modules": ("m", "n")}),
        (finding("a", "info", "n", 9), {"again": (7, 9), "modules": ("m", "n")}),
        (finding("a", "info", None, 9), {"again": (7, 9), "modules": ("m", "n")}),
    ]
    for each, changed in added:
        assert not found.add(each, 9)
        assert list(found) == [replace(known, **changed)]
    found.end("a", 10)
    found.end("a", 11)
    assert list(found) == [replace(known, ended=10, again=(7, 9), modules=("m", "n"))]
    assert not found.add(finding("a", "info", "m", 9), 12)
    assert list(found) == [replace(known, again=(7, 9), modules=("m", "n"))]
    assert found.add(graver := finding("a", "error", "m", 13), 13)
    assert list(found) == [replace(graver, modules=("m", "n"))]
    for step in range(20, 40):
        found.add(finding("a", "error", "m", step), step)
    assert found.causes["a"].again == tuple(range(40 - LATER_STEPS, 40))


def test_a_graver_finding_of_a_cause_keeps_its_consequences():
    found = FindingList(EXPLAINS)
    for each in (finding("c"), finding("b"), finding("a", "info", "m")):
        found.add(each)
    assert [(each.rule, each.severity, each.consequences) for each in found] == [("a", "warning", ("b", "c"))]
    assert found.add(finding("a", "error", "m"))
    assert [(each.severity, each.consequences) for each in found] == [("error", ("b", "c"))]
    assert found.as_grave(finding("a", "info", against=("it falls",))) == finding("a", "error")
    same = finding("a", "error", against=("it falls",))
    assert found.as_grave(same) is same


# -- muting


@pytest.mark.parametrize(
    ("module", "modules", "muted", "is_so"),
    [
        ("m", (), {"a"}, True),
        ("m", (), {"b"}, False),
        ("m", (), {"a:m"}, True),
        ("m", (), {"a:n"}, False),
        ("m", ("m", "n"), {"a:m"}, False),
        ("m", ("m", "n"), {"a:m", "a:n"}, True),
        (None, (), {"a:None"}, True),
        (None, (), set(), False),
    ],
)
def test_a_finding_is_muted_if_its_rule_or_all_of_its_modules_are(module, modules, muted, is_so):
    assert is_muted(finding("a", module=module, modules=modules), muted) is is_so


@pytest.mark.parametrize(("note", "count"), [("", 0), ("A note.", 0), ("", 1), ("A note.", 1), ("A note.", 2)])
def test_what_is_not_shown_is_counted(note, count):
    found = Findings([finding(rule) for rule in "abc"], "ab", {"c": "why"}, {"c": "what"}, note)
    found.muted = frozenset("ab"[:count])
    heard = found.heard()
    assert [each.rule for each in heard] == [*"abc"[count:]]
    assert (heard.judged, heard.skipped, heard.needed) == (("a", "b"), {"c": "why"}, {"c": "what"})
    told = ["", "1 muted finding is", "2 muted findings are"][count]
    assert heard.note == " ".join(filter(None, (note, f"{told} not shown; --muted shows them." * bool(told))))


# -- tables


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that sets the width of the terminal."""
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


LONG = "word " * 20


def test_the_table_has_a_line_for_each_finding_and_indented_lines_of_details(terminal):
    terminal(80)
    first = Finding("short", "info", "It is so.")
    second = Finding("a_rule", "error", LONG.strip(), "layer", step=12, advice="do this", class_name="Linear")
    assert Findings([first, second], judged=["x", "y"], note="A note.").lines() == [
        "severity  rule    module          step  finding",
        "--------  ------  --------------  ----  -------",
        "error     a_rule  layer (Linear)  12    word word word word word word word word",
        " " * 40 + "word word word word word word word word",
        " " * 40 + "word word word word",
        " " * 40 + "Try: do this.",
        "info      short   -               -     It is so.",
        "1 error, 1 info; 2 checks judged",
        "A note.",
    ]
    terminal(97)
    widths = [len(line) for line in Findings([second]).lines()[2:5]]
    assert max(widths) == 94
    assert Findings([Finding("empty", "info", "")]).lines()[2] == "info      empty  -       -     "


@pytest.mark.parametrize(
    "found",
    [Findings([Finding("rule", "info", "a " * 200)]), Findings(skipped={"rule": "a " * 200})],
    ids=["table", "reasons"],
)
def test_lines_that_no_terminal_shows_have_120_characters(found, monkeypatch):
    def refuse(*arguments):
        raise OSError("no terminal")

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", refuse)
    assert max(map(len, found.lines())) in (119, 120)


def test_a_word_of_a_reason_is_not_divided(terminal):
    terminal(40)
    word = "x" * 30 + "-" + "y" * 30
    assert f"    {word}" in Findings(skipped={"rule": f"because {word} is so"}).lines()


def test_a_style_is_that_of_the_severity_alone():
    found = Findings([finding("a", severity) for severity in SEVERITIES])
    lines = found.lines(lambda text, *styles: f"<{text} {'+'.join(styles)}>")
    starts = ["<error bold+red>", "<warning bold+yellow>", "<info blue>"]
    assert [line.partition(">")[0] + ">" for line in lines[2:5]] == starts
    plain = [line.partition(">")[2] for line in lines[2:5]]
    assert plain == [line[len(severity) :] for line, severity in zip(found.lines()[2:5], SEVERITIES[::-1], strict=True)]


@pytest.mark.parametrize(
    ("severities", "judged", "text"),
    [
        ([], 0, "no findings; 0 checks judged"),
        (["error"], 1, "1 error; 1 check judged"),
        (["error", "error", "info", "info"], 2, "2 errors, 2 info; 2 checks judged"),
        (["info", "warning", "error", "warning"], 3, "1 error, 2 warnings, 1 info; 3 checks judged"),
    ],
)
def test_the_summary_counts_severities_and_checks(severities, judged, text):
    found = Findings([finding("a", severity) for severity in severities], "abc"[:judged])
    assert str(found).splitlines()[-1] == text
    assert [each.severity for each in found] == sorted(severities, key=lambda s: -SEVERITIES.index(s))
    assert len(found.errors) == severities.count("error")
    assert Findings([], skipped={"x": "why"}).lines() == ["no findings; 0 checks judged, 1 could not:", "  x: why"]


def test_the_names_of_up_to_eight_checks_with_one_reason_are_listed(terminal):
    terminal(60)
    names = [f"a_check_with_a_long_name_{i}" for i in range(9)]
    eight = Findings(skipped=dict.fromkeys(names[:8], "because"))
    assert eight.lines()[1:] == [
        f"  {names[0]}, {names[1]},",
        *(f"    {names[i]}, {names[i + 1]}," for i in (2, 4)),
        f"    {names[6]}, {names[7]}:",
        "    because",
    ]
    assert Findings(skipped=dict.fromkeys(names, "because") | {"x": "no"}).lines()[1:] == [
        "  9 of them: because",
        "  x: no",
    ]
    terminal(10)
    assert max(map(len, Findings(skipped={"x": LONG}).lines()[1:])) in range(35, 41)
    html = Findings(skipped=dict.fromkeys(names, "because"))._repr_html_()
    assert all(name in html for name in names)


def test_the_page_has_a_row_for_each_finding_with_modules_in_code():
    found = [
        Finding("a", "error", "x | y\nz", "m", step=3, advice="do | this", modules=("m", "n")),
        Finding("b", "info", "It is so.", "m", class_name="Linear", value=2.0, kind="k"),
        Finding("c", "info", "It is so."),
    ]
    assert Findings(found).as_markdown().splitlines()[2:] == [
        "| error | a | `m`, `n` | 3 | x \\| y z In 2 modules: m, n. | do \\| this |",
        "| info | b | `m (Linear)` |  | It is so. Measured: 2 from k. |  |",
        "| info | c |  |  | It is so. |  |",
    ]


CURVE = tuple((step, float(step)) for step in range(3))


@pytest.mark.parametrize("value", [None, 2.0])
@pytest.mark.parametrize("evidence", [(), CURVE, (("layer", 1.0), ("other", 2.0)), ((0, 1.0), (1, math.nan))])
def test_the_curve_follows_the_figure(value, evidence):
    shown = Finding("a", "error", "<x>", "m", value=value, evidence=evidence, advice="a < b", source="S, s.py:1")
    lines = details_html(shown).split("<br>")
    measured = ["<b>Measured:</b> 2."] * (value is not None)
    curve = [line for line in lines if line.startswith("<b>Curve:</b> <svg")]
    assert len(curve) == (evidence == CURVE)
    assert lines == [
        *measured,
        *curve,
        "<b>Module:</b> m, defined in S, s.py:1.",
        "<b>Try:</b> a &lt; b.",
    ]
    assert not curve or curve[0].endswith("0 to 2, steps 0 to 2.")


def test_a_notebook_shows_a_table_and_why_checks_could_not_judge():
    cell = '<td style="text-align:left">'
    head = "".join(f'<th style="text-align:left">{n}</th>' for n in ("severity", "rule", "module", "step", "finding"))
    found = Findings([Finding("a<b", "error", "x < y", "m", step=3, advice="do")], ["q"])
    assert found._repr_html_() == (
        f'<table><tr>{head}</tr><tr>{cell}<span style="color:#dc2626">&#9679;</span> error</td>{cell}a&lt;b</td>'
        f"{cell}m</td>{cell}3</td>{cell}x &lt; y<br><b>Try:</b> do.</td></tr></table><p>1 error; 1 check judged</p>"
    )
    none = Findings([Finding("a", "info", "x")])._repr_html_()
    assert f"{cell}a</td>{cell}</td>{cell}</td>{cell}x<br></td>" in none
    assert Findings(skipped={"c": "x < y"})._repr_html_() == (
        "<details><summary>no findings; 0 checks judged, 1 could not:</summary>c: x &lt; y</details>"
    )
