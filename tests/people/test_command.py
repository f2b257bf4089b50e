"""The command finds the newest run, understands names, and writes text that a person can read."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ikkuna import cli
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.cli.run_summary import text_curve
from ikkuna.cli.terminal import Terminal, command_names
from ikkuna.store.names import Series
from ikkuna.store.run_directory import RunFile, write_run_file
from ikkuna.store.values import ModuleEntry

LAYERS, ROOT = 400, Path(__file__).parents[2]


def write_run(directory, names=("stem", "head"), dead=None, created="2026-01-01"):
    directory.mkdir(parents=True)
    write_run_file(directory, RunFile("1a2b", {}, created=created))
    backend = TensorBoardBackend()
    backend.open(directory)
    backend.describe([ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in names])
    for step in range(12):
        backend.add_scalar(Series("loss"), 2.3 + 0.001 * (step % 3), step)
        for i, name in enumerate(names):
            value = 0.0 if name == dead else 1.0 + 0.01 * ((7 * i + step) % 5)
            backend.add_scalar(Series("activations_variance", name), value, step)
        backend.commit(step)
    backend.close()
    return directory


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def called(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path / "run" / "run0002", created="2026-01-01")
    write_run(tmp_path / "run" / "named", created="2026-03-01")
    write_run(tmp_path / "run" / "run0010", created="2026-02-01")
    (tmp_path / "run" / "run0011").mkdir()  # it ended before its first value
    return tmp_path / "run"


@pytest.mark.parametrize("command", ["check", "summary", "report"])
@pytest.mark.parametrize("argument", [[], ["run"]], ids=["no argument", "the log directory"])
def test_a_directory_of_runs_means_the_newest(runs, command, argument, capsys):
    status, out, err = called(capsys, command, *argument, "--json")
    assert status == 0
    assert "ikkuna: 'run' contains 3 runs, of which the newest is 'run/named'" in err
    if command == "summary":
        assert json.loads(out)["path"] == "run/named"


def test_one_run_below_a_directory_is_taken(tmp_path, capsys):
    write_run(tmp_path / "run" / "run0001")
    assert called(capsys, "summary")[2] == "ikkuna: 'run' contains the run 'run/run0001'\n"
    assert called(capsys, "summary", "run/run0001")[2] == ""


def test_without_a_run_the_command_says_what_to_pass(capsys):
    assert called(capsys, "check") == (2, "", "ikkuna: there is no directory 'run' here; pass the path of a run\n")


def test_the_command_alone_prints_help(capsys):
    status, out, err = called(capsys)
    assert (status, err) == (0, "")
    assert out.startswith("usage: ikkuna")
    assert all(f"    {name} " in out for name in ("check", "list", "runs", "why"))


def test_runs_are_listed_with_the_newest_last(runs, capsys):
    rows = json.loads(called(capsys, "runs", "--json")[1])
    assert [(row["run"], row["last_step"], row["steps"]) for row in rows] == [
        ("run/run0002", 11, 12), ("run/run0010", 11, 12), ("run/named", 11, 12)
    ]  # fmt: skip
    assert rows[0].keys() == {"run", "created", "last_step", "loss", "findings", "steps"}
    assert called(capsys, "runs")[1].splitlines()[-1].split()[0] == "run/named"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("norm", "NormSubscriber"), ("normsubscriber", "NormSubscriber"), ("perplexty", "PerplexitySubscriber")],
)
def test_names_are_matched(name, meant, capsys):
    status, _, err = called(capsys, "list", "subscribers", name)
    assert status == 2
    assert f"did you mean '{meant}'?" in err


@pytest.mark.parametrize("topic", ["plugins", "rules"])
def test_lists_have_no_markup(topic, capsys):
    out = called(capsys, "list", topic)[1]
    assert not re.search(r"`|:\w+:|\\[a-z]|\$", out)
    assert not re.search(r" [.,]|,,", out)


def test_check_names_no_attribute_and_has_colours(runs, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    write_run(runs / "run0012", dead="stem", created="2026-04-01")
    from ikkuna.diagnosis import Finding, Findings, check

    found = Findings([Finding("dead_units", "error", "All are 0.", "stem")], skipped={"x": "y"})
    monkeypatch.setattr(check, "check", lambda path, rules, muted: found)
    assert "\x1b[1;31merror\x1b[0m " in called(capsys, "check")[1]
    monkeypatch.undo()
    assert "findings." not in called(capsys, "check", runs)[1]


def test_of_400_modules_the_dead_one_is_shown(tmp_path, capsys):
    names = [f"layer{i}" for i in range(LAYERS)]
    write_run(tmp_path / "run", names, dead="layer217")
    out = called(capsys, "summary")[1]
    [line] = [line for line in out.splitlines() if line.startswith("layer217 ")]
    assert set(line.split()[1]) == {"0"}
    assert f"16 of {LAYERS} modules that differ most" in out
    assert "(+" not in out


def test_a_curve_shows_its_range_and_is_flat_where_only_noise_changes(tmp_path, capsys):
    write_run(tmp_path / "run")
    out = called(capsys, "summary")[1]
    [header] = [line for line in out.splitlines() if line.startswith("network ")]
    [line] = [line for line in out.splitlines() if line.startswith("loss ")]
    assert header.split() == ["network", "last", "min", "max"]
    assert line.split()[:4] == ["loss", "2.302", "2.3", "2.3"]
    assert len(set(line.split()[4])) == 1
    terminal = Terminal(io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert len(set(text_curve(np.linspace(2.3, 1.0, 8), 8, terminal))) == 8


JSON = {
    "runs": ["runs"],
    "summary": ["summary"],
    "check": ["check"],
    "why": ["why"],
    "report": ["report"],
    "diff": ["diff", "run", "run"],
    "tensorboard": ["tensorboard", "--dry-run"],
    "list": ["list", "presets"],
}


@pytest.mark.parametrize("command", JSON)
def test_the_documented_fields_of_json_are_written(command, runs, capsys):
    page = (ROOT / "sphinx" / "source" / "the_command.rst").read_text().partition("JSON\n----")[2]
    [row] = re.findall(rf"^``{command}`` +(.*)$", page, re.MULTILINE)
    status, out, _ = called(capsys, *JSON[command], "--json")
    assert status == 0
    shown = json.loads(out)
    assert list((shown[0] if isinstance(shown, list) else shown).keys()) == re.findall(r"``(\w+)``", row)


def test_every_command_has_json(capsys):
    for name in command_names():
        cli.main([name, "--help"])
        assert "--json" in capsys.readouterr().out


def test_a_run_that_ended_in_its_first_step_says_what_ended_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dump = tmp_path / "run" / "run0001" / "dumps" / "step_000000"
    dump.mkdir(parents=True)
    write_run_file(tmp_path / "run" / "run0001", RunFile("1a2b", {}, created="2026-01-01"))
    facts = {"format": 1, "step": 0, "reasons": ["IndexError: Target 10 is out of bounds."], "options": {"every": 1}}
    facts |= {"findings": [], "rules": [], "files": {}, "left_out": {}}
    (dump / "dump.json").write_text(json.dumps(facts), encoding="utf-8")
    for command in ("check", "summary", "report"):
        assert cli.main([command]) == 2
        error = capsys.readouterr().err
        assert (
            "'run/run0001' has no value: its training is in its first step, or ended there, with IndexError: Target 10"
            in error
        )
        assert "'ikkuna replay run/run0001/dumps/step_000000' shows the batch; ikkuna.preflight(" in error
    (dump / "dump.json").write_text("{}", encoding="utf-8")
    assert cli.main(["check"]) == 2
    assert "or ended there; 'ikkuna replay" in capsys.readouterr().err
