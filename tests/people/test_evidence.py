"""A finding shows its evidence, in the same words and with the same step in every view."""

import html
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.diagnosis import Finding, Findings
from ikkuna.diagnosis.check import check
from ikkuna.diagnosis.stored_findings import read_findings
from ikkuna.reading import read_run
from ikkuna.report import write_report
from ikkuna.support.modules import definition, walk


class Block(nn.Module):
    """Two layers of which the first is dead."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
        nn.init.constant_(self.fc1.bias, -50.0)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


LINE = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line == "class Block(nn.Module):")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a run with a dead layer, and the findings of its handle."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(Block()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = torch.randn(64, 8), torch.arange(64) % 4
    log_dir = tmp_path_factory.mktemp("runs")
    with ikkuna.watch(model, loss=loss, log_dir=log_dir, verbosity=0, recorder=False) as handle:
        for _ in range(60):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    [path] = log_dir.iterdir()
    return path, handle.findings


@pytest.fixture(scope="module")
def dead(trained):
    [finding] = [each for each in trained[1] if each.rule == "dead_units"]
    return finding


def test_a_finding_has_figure_limits_place_and_curve(dead):
    assert (dead.module, dead.class_name) == ("0.act", "ReLU")
    assert re.fullmatch(rf"Block, .*test_evidence\.py:{LINE}", dead.source)
    assert dead.limits[0] == -math.inf
    assert dead.value > dead.limits[1]
    assert [step for step, _ in dead.curve()] == sorted(step for step, _ in dead.curve())
    labels = [label for label, _ in dead.details()]
    assert labels[:2] == ["Measured", "Module"]
    assert labels[-1] == "Try"
    assert f"healthy is below {dead.limits[1]:.4g}" in dict(dead.details())["Measured"]


def words(text):
    return " ".join(html.unescape(re.sub(r"<svg.*?</svg>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


def test_every_view_has_the_same_words_and_step(trained, dead, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    path, found = trained
    views = {
        "terminal": str(check(path)),
        "notebook": found._repr_html_(),
        "TensorBoard": read_run(path).texts["findings/dead_units"],
        "report": write_report(path, tmp_path / "report.html").read_text(),
    }
    for view, text in views.items():
        shown = words(text)
        for label, detail in dead.details():
            if label != "It also explains":  # what follows is not known when the page of text is written
                assert f"{label}: {detail}." in shown, (view, label)
        assert dead.curve_caption() in shown, view
        assert dead.message in shown, view
        head = f"{dead.severity} dead_units 0.act (ReLU) {dead.step} "
        assert (head in shown) or f"dead_units in 0.act (ReLU) at step {dead.step}:" in shown, view
    assert "<polyline" in views["notebook"]
    assert "<polyline" in views["report"]


def test_the_stored_finding_is_the_shown_one(trained):
    stored, live = read_findings(trained[0]), trained[1]
    assert [each.as_dict() for each in stored] == [each.as_dict() for each in live]


def test_findings_of_earlier_versions_are_read(tmp_path):
    fields = Finding("dead_units", "warning", "Dead.", "fc", "activations_sparsity", 3, 1.0).as_dict()
    for name in ("limits", "class_name", "source", "against"):
        del fields[name]
    (tmp_path / "findings.1.jsonl").write_text(json.dumps({"event": "opened", "finding": fields, "step": 3}) + "\n")
    [found] = read_findings(tmp_path)
    assert found.details() == [("Measured", "1 from activations_sparsity")]


@pytest.mark.parametrize(
    ("judged", "values", "severity"),
    [
        (range(3, 12), {3, 4, 5, 6, 7, 8, 9, 10, 11}, "warning"),
        (range(3, 4), {3}, "warning"),  # a rule that judges once, such as that of the first loss
        (range(3, 12), {3}, "info"),  # the mistake is over
    ],
    ids=["lasting", "once", "over"],
)
def test_what_speaks_against_a_finding_is_said_while_it_does(judged, values, severity):
    class SlowRule(ikkuna.diagnosis.Rule):
        """A test."""

        name, needs, severity, severity_while_falling, patience = "slow", {"loss": ""}, "warning", "info", 1

        def scores(self, history):
            if history.step in judged:
                yield ikkuna.diagnosis.Score(float(history.step in values), 1.0)

    judge = ikkuna.diagnosis.Judge([SlowRule()])
    for step in range(12):
        judge.add("loss", None, step, 1.0)
        judge.finish_step(step)
        if step == 3:
            [early] = judge.findings
    assert early.severity == "info"
    assert "if it does not, this is a warning" in dict(early.details())["Against it"]
    [late] = judge.findings
    assert (late.severity, late.against == ()) == (severity, severity == "warning")


def test_what_was_usual_is_shown_without_a_threshold():
    curve = tuple((step, 1.0 + step) for step in range(6))
    text = Finding("jump", "warning", "It jumps.", step=5, value=9.0, kind="loss", evidence=curve).details()
    assert text == [("Measured", "9 from loss; 1 to 5 was usual before")]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf], [1e308, -1e308], [0.0] * 50, [5e-324, 1.0]])
def test_any_curve_can_be_shown(values):
    found = Findings([Finding("x", "info", "y", evidence=tuple(enumerate(values)))])
    assert "nan" not in str(found) + found._repr_html_()
    assert str(found)


def test_the_definition_is_that_of_the_users_innermost_class():
    class Local(Block):
        pass

    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Local()))
    owners = {named.name: named.owner for named in walk(root)}
    assert owners["0"] is None
    assert owners["1.0.act"] is Local
    assert re.fullmatch(r"Local, .*test_evidence\.py:\d+", definition(Local))
