"""A finding reaches the person: through a function, wandb and MLflow, unless it is muted."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.backends.loggers import StepValues
from ikkuna.cli.commands.demo import train_sample
from ikkuna.diagnosis import Finding, Rule, Score
from ikkuna.diagnosis.check import check
from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.integrations.mlflow import MlflowBackend
from ikkuna.integrations.wandb import WandbBackend
from ikkuna.store import writer


def found_in_training(tmp_path, **options):
    found = []
    train_sample(tmp_path, 60, on_finding=found.append, recorder=False, **options)
    return {finding.rule: finding for finding in found}


def test_a_function_is_called_once_for_each_rule(tmp_path):
    found = found_in_training(tmp_path)
    assert found["dead_units"].module == "relu3"


@pytest.mark.parametrize("name", ["dead_units", "dead_units:relu3"])
def test_muted_findings_are_not_reported(tmp_path, name, caplog):
    assert "dead_units" not in found_in_training(tmp_path, mute=[name])
    assert "dead_units" not in caplog.text
    heard, all_ = ({finding.rule for finding in check(tmp_path / "run0001", **o)} for o in ({}, {"muted": True}))
    assert all_ - heard == ({"dead_units"} if ":" in name else set())  # a rule that is muted as a whole does not judge


def test_other_modules_of_a_muted_rule_are_reported(tmp_path):
    assert "dead_units" in found_in_training(tmp_path, mute=["dead_units:relu1"])


@pytest.mark.parametrize(
    ("mute", "kind", "words"),
    [(["dead_unit"], ConfigError, "did you mean 'dead_units'"), ("dead_units", ConfigTypeError, r"pass \['dead_units'\]")],
)  # fmt: skip
def test_a_wrong_name_is_an_error(tmp_path, mute, kind, words):
    with pytest.raises(kind, match=words):
        found_in_training(tmp_path, mute=mute)


class HighLossRule(Rule):
    """A test."""

    name, needs, meaning, patience, thresholds, limit = "high_loss", {"loss": ""}, "High.", 1, ("limit",), 2.0

    def scores(self, history):
        for name, curve in history.fresh("loss"):
            yield Score(curve.last / self.limit, curve.last, name or None)


@pytest.mark.parametrize(("off", "expected"), [([], []), (["--off"], ["high_loss"])])
def test_a_rule_is_muted_while_the_training_runs(off, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(writer, "_CHECK_SECONDS", 0.0)
    model, found = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loss = nn.MSELoss()
    options = {"loss": loss, "rules": [HighLossRule()], "recorder": False, "verbosity": 0}
    with ikkuna.watch(model, log_dir=tmp_path, on_finding=found.append, **options) as handle:

        def train(steps, target):
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model(torch.ones(4, 2)), torch.full((4, 1), target)).backward()
                optimizer.step()
            assert handle.message_bus.run.flush(10)

        train(20, 0.0)
        [run] = tmp_path.iterdir()
        assert cli.main(["mute", str(run), "high_los"]) == 2
        assert "did you mean 'high_loss'?" in capsys.readouterr().err
        assert cli.main(["mute", str(run), "high_loss"]) == 0
        assert cli.main(["mute", str(run), "high_loss", *off, "--json"]) == 0
        capsys.readouterr()
        assert cli.main(["mute", str(run)]) == 0
        assert capsys.readouterr().out == f"muted in '{run}': {'nothing' if off else 'high_loss'}\n"
        train(20, 0.0)  # the file is read by the thread that writes
        train(20, 100.0)
    assert [each.rule for each in found] == expected
    assert [each.rule for each in handle.findings] == expected
    for command in (["check"], ["summary"], ["report", "-o", str(tmp_path / "report.html")]):
        for also in ([], ["--muted"]):
            capsys.readouterr()
            cli.main([*command, str(run), *also])
            page = (tmp_path / "report.html").read_text("utf-8") if command[0] == "report" else capsys.readouterr().out
            assert ("high_loss" in page) == bool(also or expected)


def test_a_finding_that_the_training_mutes_is_stored_and_not_shown(tmp_path, capsys):
    found_in_training(tmp_path, mute=["dead_units:relu3"])
    cli.main(["check", str(tmp_path)])
    assert "1 muted finding is not shown; --muted" in capsys.readouterr().out
    assert cli.main(["check", str(tmp_path), "--muted"]) == 1
    assert "dead_units" in capsys.readouterr().out


def backend_without_server(backend, **attributes):
    made = backend.__new__(backend)
    vars(made).update(attributes)
    return made


def values(count, severity="error"):
    findings = [Finding(f"rule{i}", severity, "It is wrong.", "fc", advice="mend it") for i in range(count)]
    return StepValues(step=3, findings=findings)


@pytest.mark.parametrize(("severity", "count", "expected"), [("error", 1, 1), ("info", 3, 0), ("warning", 50, 20)])
def test_wandb_gets_a_limited_number_of_alerts(severity, count, expected):
    alerts = []
    target = SimpleNamespace(alert=lambda title, text, **more: alerts.append((title, text, more)))
    levels = SimpleNamespace(AlertLevel=SimpleNamespace(ERROR="ERROR", WARN="WARN"))
    backend = backend_without_server(WandbBackend, _target=target, _wandb=levels, _alerts=0)
    backend.log_step(values(count, severity))
    backend.log_step(values(0))
    assert len(alerts) == expected
    if expected:
        title, text, more = alerts[0]
        assert (title, more["level"]) == ("ikkuna: rule0", "ERROR" if severity == "error" else "WARN")
        assert text == f"{severity}: rule0 in fc: It is wrong. mend it"
        assert more["wait_duration"] == 600


def test_mlflow_gets_a_tag(monkeypatch):
    tags = []
    client = SimpleNamespace(set_tag=lambda run, name, text: tags.append((run, name, text)), log_batch=None)
    entities = SimpleNamespace(Metric=None, Param=None)
    backend = backend_without_server(MlflowBackend, _client=client, _run_id="r", _entities=entities)
    backend.log_step(values(1))
    assert tags == [("r", "ikkuna.finding.rule0", "error: rule0 in fc: It is wrong. mend it")]
