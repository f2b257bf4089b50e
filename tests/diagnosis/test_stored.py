"""Findings and what rules read are stored where they arise, and every view shows the same."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.backends.run import Run
from ikkuna.diagnosis import Finding, Judge, Rule, Score, get_rules
from ikkuna.diagnosis.check import check
from ikkuna.diagnosis.stored_findings import changes, event_line, event_text, read_findings
from ikkuna.diagnosis.stored_judgement import JudgementBackend
from ikkuna.diagnosis.stored_values import RuleValuesFormat, read_rule_values
from ikkuna.export.messages import NetworkMessage, Stamp
from ikkuna.metrics.live_rules import RuleSubscriber
from ikkuna.metrics.subscriber.subscription import Sampling
from ikkuna.numerics.statistics import Record
from ikkuna.report import write_report
from ikkuna.store.append_file import ReplacedEnd
from ikkuna.store.names import Series, SeriesGroup
from ikkuna.testing import small_model


class HighLossRule(Rule):
    """The loss is above 10."""

    name, needs, meaning, patience, version = "high_loss", {"loss": ""}, "The loss is {figure:g}.", 1, 3

    def scores(self, history):
        loss = history.curve("loss")
        yield Score(loss.last / 10, loss.last)


class Watched:
    """Rules over losses that are made up, with the files of a run; no model trains."""

    def __init__(self, directory, rules="default"):
        self.run = Run(directory)
        self.rules = RuleSubscriber(["batch_finished", "loss"], Judge(get_rules(rules)))
        self.rules._host = SimpleNamespace(
            open_run=lambda: self.run,
            sampling=Sampling(),
            thread=SimpleNamespace(subscriber_is_running=True),
        )

    def step(self, number, loss):
        stamp = Stamp(number, number, 1)
        self.run.show(Series("loss"), loss, number)
        self.rules.compute(NetworkMessage(stamp, "loss", data=loss, record=Record(n=1.0)))
        self.rules.finish(stamp)
        for method, arguments, stamp, _ in self.rules.take_results():
            self.run.add_all([(method, arguments, None)], stamp.global_step, ("tb",))
        self.run.commit(number)

    def close(self):
        assert self.run.close()
        return self.run.directory


def made_up(directory, steps):
    """Write a run with a spike of three steps."""
    watched = Watched(directory, ["loss_spike"])
    noise = np.random.default_rng(1).normal(1.0, 0.01, steps)
    for step, value in enumerate(noise.tolist()):
        watched.step(step, 80.0 if steps // 2 <= step < steps // 2 + 3 else value)
    return watched.close(), watched.rules.findings


def trained(directory, steps):
    torch.manual_seed(0)
    model, loss = small_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with ikkuna.watch(model, loss=loss, log_dir=directory, rules=["loss_spike"], verbosity=0) as watched:
        for step in range(steps):
            x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
            optimizer.zero_grad()
            factor = 300.0 if steps // 2 <= step < steps // 2 + 3 else 1.0
            loss(factor * model(x), y).backward()
            optimizer.step()
    return watched.run_directory, watched.findings


@pytest.mark.parametrize(("make", "steps"), [(made_up, 900), (made_up, 5_000), (made_up, 20_000), (trained, 900)])
def test_a_spike_of_three_steps_is_the_same_in_every_view(make, steps, tmp_path, capsys):
    run, live = make(tmp_path, steps)
    [finding] = live
    assert finding.rule == "loss_spike"
    assert steps // 2 <= finding.step < steps // 2 + 3
    assert tuple(check(run)) == tuple(live)
    assert tuple(check(run, "loss_spike")) == tuple(live)
    for command in ("check", "summary"):
        cli.main([command, str(run)])
        assert finding.message in " ".join(capsys.readouterr().out.split())
    page = write_report(run, tmp_path / "report.html").read_text()
    assert f"<p>{finding.message}</p>" in page
    assert f"<b>{finding.severity}: loss_spike at step {finding.step}:</b>" in page


def test_a_finding_is_stored_at_its_step_and_ends(tmp_path):
    watched = Watched(tmp_path, HighLossRule())
    for step, loss in enumerate([1.0, 20.0, 1.0, 1.0]):
        watched.step(step, loss)
    directory = watched.close()
    [file] = directory.glob("findings.*.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in events if e["event"] != "judged"] == [("opened", 1), ("ended", 2)]
    [opened] = (e["finding"] for e in events if e["event"] == "opened")
    assert (opened["version"], opened["evidence"]) == (3, [[0, 1.0], [1, 20.0]])
    assert [finding.ended for finding in check(directory)] == [2]
    assert tuple(check(directory)) == tuple(check(directory, HighLossRule())) == tuple(watched.rules.findings)


@pytest.mark.parametrize(("back_to", "left"), [(1, 0), (2, 0), (3, 1)])
def test_a_training_that_goes_back_retracts_the_findings_since_then(tmp_path, back_to, left):
    watched = Watched(tmp_path, HighLossRule())
    for step in range(5):
        watched.step(step, 20.0 if step == 2 else 1.0)
    watched.run.rewind(back_to)
    for step in range(back_to, 5):
        watched.step(step, 1.0)
    directory = watched.close()
    assert len(watched.rules.findings) == left
    assert tuple(check(directory)) == tuple(watched.rules.findings)
    assert tuple(check(directory, HighLossRule())) == tuple(watched.rules.findings)


def test_a_run_without_stored_findings_is_judged_and_says_so(tmp_path, capsys):
    directory, live = made_up(tmp_path, 300)
    for file in directory.glob("findings.*"):
        file.unlink()
    found = check(directory)
    assert [(f.rule, f.step) for f in found] == [(f.rule, f.step) for f in live]
    cli.main(["check", str(directory)])
    assert "The run has no stored findings" in capsys.readouterr().out


def test_no_value_of_a_rule_is_acknowledged_before_the_system_has_it(tmp_path):
    watched = Watched(tmp_path, HighLossRule())
    for step in range(3):
        watched.step(step, 20.0)
    assert watched.run.flush(10)
    assert watched.run.acked_step == 2
    read = read_rule_values(watched.run.directory)
    assert [step for step, _ in read.sessions[0][1]] == [0, 1, 2]
    assert [finding.rule for finding in read_findings(watched.run.directory)] == ["high_loss"]
    watched.close()


GROUPS = [
    SeriesGroup("loss", (None,)),
    SeriesGroup("weights_norm2", ("a", "b")),
    SeriesGroup("loss", (None,), "testing"),
]
NUMBERS = st.floats(width=64)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(st.tuples(st.sampled_from(range(3)), NUMBERS), max_size=8), st.integers(0, 30))
def test_what_rules_read_is_read_back_bit_by_bit_up_to_the_end_of_the_file(tmp_path_factory, values, cut):
    """Each step is a record; a file that is cut anywhere gives a beginning of the steps."""
    directory = tmp_path_factory.mktemp("run")
    made = RuleValuesFormat()
    content = made.header()
    for step, (number, value) in enumerate(values):
        group = GROUPS[number]
        content += made.step(step, [(group, np.full(len(group.names), value), step)])
    content = content[: len(content) - min(cut, len(content) - 8)]
    (directory / made.name("1")).write_bytes(content)
    read = read_rule_values(directory)
    [(begin, steps)] = read.sessions
    assert begin is None
    assert [step for step, _ in steps] == list(range(len(steps)))
    assert cut or len(steps) == len(values)
    for (step, [group]), (number, value) in zip(steps, values, strict=False):
        expected = GROUPS[number]
        assert (group.kind, group.pass_name, tuple(group.names)) == (expected.kind, expected.pass_name, expected.names)
        assert np.array(group.values).tobytes() == np.full(len(expected.names), value).tobytes()
        assert group.step == step


def test_a_damaged_record_is_skipped_and_the_end_of_an_earlier_file_is_replaced(tmp_path):
    made = RuleValuesFormat()
    head = made.header() + made.group(GROUPS[0])
    steps = [made.step(i, [(GROUPS[0], np.array([float(i)]), i)]) for i in range(4)]
    damaged = bytearray(steps[1])
    damaged[-1] ^= 1
    (tmp_path / made.name("1")).write_bytes(head + steps[0] + bytes(damaged) + steps[2] + steps[3])
    replaced = ReplacedEnd(made.name("1"), len(head + steps[0] + steps[1] + steps[2]), 3)
    (tmp_path / made.name("2")).write_bytes(made.header(replaced) + steps[3] + made.resumed(2) + made.loss(5, 1, 2))
    read = read_rule_values(tmp_path)
    assert [(begin, [step for step, _ in found]) for begin, found in read.sessions] == [(None, [0, 2, 3]), (2, [])]
    assert read.lost == 6


def test_the_modules_and_lost_definitions_of_series_are_stored_again(tmp_path):
    backend = JudgementBackend()
    backend.open(tmp_path)
    backend.describe(small_entries())
    backend.add_judged([(0, [(GROUPS[1], np.array([1.0, math.nan]), 0)])])
    backend.commit(0)
    backend.flush(10)
    backend._writer._queue.dropped += 1  # as after a queue that was full
    backend.add_judged([(1, [(GROUPS[1], np.array([2.0, 3.0]), 1)])])
    backend.commit(1)
    backend.close(10)
    [file] = tmp_path.glob("rule_values.*")
    assert file.read_bytes().count(b'"weights_norm2"') == 2
    read = read_rule_values(tmp_path)
    assert read.modules == small_entries()
    assert [groups[0].values for _, groups in read.sessions[0][1]][1] == [2.0, 3.0]


def small_entries():
    from ikkuna.metrics.bus.bus import described
    from ikkuna.support.modules import walk

    return described(walk(small_model()))


FINDINGS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        lambda modules, again, ended, value: Finding(
            "",
            "info",
            "text",
            modules=modules,
            again=again,
            ended=ended,
            value=value,
            evidence=((1, value), ("fc", 2.0)),
        ),
        st.lists(st.sampled_from(["x", "y"]), max_size=2).map(tuple),
        st.lists(st.integers(0, 9), max_size=2).map(tuple),
        st.none() | st.integers(0, 9),
        st.sampled_from([0.5, math.inf, -math.inf]),
    ),
)


@given(st.lists(FINDINGS, max_size=5))
def test_events_lead_to_the_findings_of_the_last_step(tmp_path_factory, states):
    """Later states of a finding change its modules, its consequences and its end alone."""
    from dataclasses import replace

    directory, before, text, first = tmp_path_factory.mktemp("run"), {}, "", {}
    for step, state in enumerate(states):
        named = {rule: replace(finding, rule=rule) for rule, finding in state.items()}
        after = {
            rule: replace(finding, value=first[rule].value, evidence=first[rule].evidence)
            if rule in before
            else finding
            for rule, finding in named.items()
        }
        first = {rule: first[rule] if rule in before else finding for rule, finding in after.items()}
        text += "".join(event_line(event_text(event), step, 0.0) for event in changes(before, after))
        before = after
    (directory / "findings.1.jsonl").write_text(text)
    assert set(read_findings(directory)) == set(before.values())


ODD = (
    None,
    True,
    -1,
    2**63,
    10**30,
    math.nan,
    "",
    "\x1b[31m",
    "info",
    [],
    {},
    [[]],
    [["a", 1]],
    [["a"]],
    [1, 2],
    {"a": 1},
)
EVENTS = [
    {"event": "judged", "judged": ["dead"], "skipped": {"x": "why"}, "needed": {"dead": "a layer"}, "step": 1},
    {
        "event": "opened",
        "finding": Finding("dead", "warning", "", "fc", step=1, evidence=((1, 2.0),)).as_dict(),
        "step": 1,
    },
    {"event": "changed", "rule": "dead", "severity": "error", "modules": ["fc"], "consequences": [], "step": 2},
    {"event": "ended", "rule": "dead", "ended": 3, "step": 3},
    {"event": "explained", "rule": "dead", "step": 4},
]


def changed(value, rng):
    """Return a value in which one part, at any depth, is another one or is missing."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(ODD)
    value = value.copy()
    place = rng.choice([*value] if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.2:
        del value[place]
    else:
        value[place] = changed(value[place], rng)
    return value


def test_events_with_wrong_fields_are_skipped_and_the_others_are_read(tmp_path, capsys):
    """A file of findings may be damaged, or made to harm its reader."""
    rng = random.Random(3)
    right = Finding("right", "error", "It is right.", step=0).as_dict()
    first = {"event": "opened", "finding": right, "step": 0}
    for _ in range(1500):
        events = json.loads(json.dumps(EVENTS))
        for i in rng.sample(range(len(events)), 2):
            events[i] = changed(events[i], rng)
        lines = [json.dumps(first), *(json.dumps(event) for event in events if isinstance(event, dict))]
        (tmp_path / "findings.0.jsonl").write_text("\n".join(lines) + "\n")
        found = read_findings(tmp_path)
        assert found[0].rule == "right"
        assert str(found).replace("\n", "").isprintable()
        assert json.loads(json.dumps([finding.as_dict() for finding in found]))
