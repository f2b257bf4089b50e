"""A finished run is judged as it was while it trained; damaged and foreign files are handled."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.backends.jsonl import JSONLinesBackend
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.diagnosis.check import check
from ikkuna.errors import ConfigError
from ikkuna.reading import read_run
from ikkuna.store.names import Series
from ikkuna.testing import small_model

DRAW = torch.Generator().manual_seed(1)
X = torch.randn(64, 4, generator=DRAW)
Y = torch.randint(0, 3, (64,), generator=DRAW)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run with two mistakes, and the findings while it trained."""
    directory = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model, loss = small_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.first.parameters(), 1e-3)
    with ikkuna.watch(model, loss=loss, log_dir=directory) as exporter:
        for _ in range(61):
            rows = torch.randint(0, 64, (16,), generator=DRAW)
            loss(model(X[rows]), Y[rows]).backward()
            optimizer.step()
    (run,) = directory.iterdir()
    return run, exporter.findings


def test_a_finished_run_has_the_findings_of_the_live_rules(faulty):
    run, live = faulty
    found = check(run)
    assert tuple(found) == tuple(live)
    assert {f.rule for f in found} == {"not_in_optimizer", "not_zeroed"}
    assert set(found.judged) == set(live.judged)
    assert found.skipped.keys() == live.skipped.keys()
    assert not found.note


def test_rules_judge_every_step_again_from_the_same_doubles(faulty):
    run, live = faulty
    found = check(run, "default")
    assert tuple(found) == tuple(live)
    assert set(found.judged) == set(live.judged)


def test_the_command_prints_a_table_and_returns_1(faulty, capsys):
    assert cli.main(["check", str(faulty[0])]) == 1
    out = capsys.readouterr().out
    assert "not_in_optimizer" in out
    assert "could not:" in out
    assert "the training has nothing that they judge" in " ".join(out.split())


def test_the_command_writes_json(faulty, capsys):
    assert cli.main(["check", str(faulty[0]), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["rule"] for finding in report["findings"]} == {"not_in_optimizer", "not_zeroed"}
    assert report["findings"][0]["evidence"]
    assert "dead_units" in report["judged"]
    assert "overfit" in report["skipped"]
    assert report["note"] == ""


def test_the_command_can_be_restricted_to_some_rules(faulty, capsys):
    assert cli.main(["check", str(faulty[0]), "--rules", "weight_decay,overfit"]) == 0
    assert "no findings; 1 check judged, 1 could not" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["check", "/nowhere"], ["check", ".", "--rules", "nonsense"]])
def test_bad_input_returns_2_and_a_line(arguments, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ikkuna: ")
    assert error.count("\n") == 1


def test_the_package_can_be_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ikkuna", "check", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "neither an event file nor a file of JSON lines" in done.stderr


def test_a_directory_of_runs_is_refused_and_names_them(faulty):
    with pytest.raises(ConfigError, match="it contains the run .*run0001"):
        check(faulty[0].parent)


def test_a_damaged_run_is_judged_by_what_is_left(faulty, tmp_path, caplog):
    for pattern in ("events*", "rule_values*"):
        (file,) = faulty[0].glob(pattern)
        data = bytearray(file.read_bytes())
        for position in (len(data) // 3, 2 * len(data) // 3):
            data[position] ^= 0xFF
        (tmp_path / file.name).write_bytes(data[:-5])
    found = check(tmp_path)
    assert "not_in_optimizer" in {finding.rule for finding in found}
    assert "no stored findings" in found.note
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"not a run"])
def test_a_file_that_is_no_run_is_refused(content, tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(content)
    with pytest.raises(ConfigError, match="no value"):
        check(tmp_path)


SERIES = [
    Series("weights_norm2", "a.0"),
    Series("loss"),
    Series("loss", None, "testing"),
    Series("odd kind/%", "x:1.0"),
]


@pytest.mark.parametrize("backend", [TensorBoardBackend, JSONLinesBackend])
def test_every_stored_value_is_read_back(backend, tmp_path):
    made = backend()
    made.open(tmp_path)
    values = [0.5, 2.0, float("inf"), -1.0]
    for step in range(3):
        for series, value in zip(SERIES, values, strict=True):
            made.add_scalar(series, value * (step + 1), step)
        made.commit(step)
    made.close()
    expected = [
        (series.kind, series.name, series.pass_name, step, value * (step + 1))
        for step in range(3)
        for series, value in zip(SERIES, values, strict=True)
    ]
    stored = [tuple(point) for session in read_run(tmp_path).sessions() for point in session]
    assert sorted(map(repr, stored)) == sorted(map(repr, expected))


def test_the_modules_are_read_back(tmp_path):
    from ikkuna.metrics.bus.bus import described
    from ikkuna.support.modules import walk

    modules = described(walk(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2))))
    made = TensorBoardBackend()
    made.open(tmp_path)
    made.describe(modules)
    made.add_scalar(SERIES[1], 1.0, 0)
    made.commit(0)
    made.close()
    assert read_run(tmp_path).modules == modules


def write(directory, name, losses, first=0):
    """Write a run with one loss per step."""
    lines = [
        json.dumps({"kind": "loss", "module": None, "pass": "training", "step": first + i, "value": loss})
        for i, loss in enumerate(losses)
    ]
    (directory / f"values.{name}.jsonl").write_text("\n".join(lines) + "\n")


def test_a_resumed_run_begins_a_new_history(tmp_path):
    """Two healthy parts are no divergence, although the second one begins far above the end of the first."""
    falling = [2.0 * 0.97**i for i in range(60)]
    write(tmp_path, "1", falling)
    write(tmp_path, "2", [5.0 * loss for loss in falling], first=30)
    assert not check(tmp_path, "diverges")
    write(tmp_path, "2", [10.0 * loss for loss in falling], first=60)  # without a step back it is one history
    assert [finding.rule for finding in check(tmp_path, "diverges")] == ["diverges"]


def test_a_run_that_is_too_short_is_not_judged(tmp_path):
    write(tmp_path, "1", [1.0])
    assert "not yet enough" in check(tmp_path, "diverges").skipped["diverges"]
