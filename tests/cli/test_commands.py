"""Each command works on real runs, and answers bad input with a line."""

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from ikkuna import cli
from ikkuna.cli.commands.demo import train_sample
from ikkuna.cli.commands.list import TYPES
from ikkuna.metrics.messages.kinds import BUILT_IN
from ikkuna.reading import read_run
from ikkuna.store.run_directory import RunFile, write_run_file
from ikkuna.store.values import ModuleEntry


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    train_sample(directory, steps=41, rules=None)
    return directory / "run0001"


def output(capsys, *arguments, status=0):
    assert cli.main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


def test_the_demo_finds_its_mistake(tmp_path, capsys):
    page = tmp_path / "page.html"
    out = output(capsys, "demo", "--log-dir", tmp_path, "--steps", 60, "-o", page)
    assert "dead" in out.split("finding\n")[1]
    assert f"Open {page}" in out
    assert "dead_units" in page.read_text()
    done = json.loads(output(capsys, "demo", "--log-dir", tmp_path, "--steps", 60, "-o", page, "--json"))
    assert (done["run"], done["findings"][0]["rule"]) == (str(tmp_path / "run0002"), "dead_units")
    assert cli.main(["demo", "--steps", "0"]) == 2


@pytest.mark.parametrize(
    ("command", "name"), [("subscribers", "NormSubscriber"), ("backends", "jsonl"), ("presets", "default")]
)
def test_plugins_are_listed_with_distribution_and_description(command, name, capsys):
    rows = json.loads(output(capsys, "list", command, "--json"))
    [row] = [row for row in rows if row["name"] == name]
    assert row["distribution"].startswith("ikkuna ")
    assert row["description"].endswith((".", "always."))
    assert f" {name} " in output(capsys, "list", command)
    assert name in output(capsys, "list", command, name)


def test_lists_of_plugins_import_no_torch():
    code = "import sys; from ikkuna.cli import main; main(['list', 'subscribers']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_plugins_of_every_type_are_listed_and_imported(capsys):
    rows = json.loads(output(capsys, "list", "plugins", "--load", "--json"))
    assert {row["type"] for row in rows} == {"subscriber", "preset", "backend", "rule"}
    assert {row["state"] for row in rows} == {"works"}


def test_a_broken_plugin_is_named(capsys, monkeypatch):
    from importlib.metadata import EntryPoint

    from ikkuna.support import plugins

    monkeypatch.setattr(plugins, "plugins", lambda group: {"bad": (EntryPoint("bad", "no_such_module:X", group),)})
    rows = json.loads(output(capsys, "list", "plugins", "--load", "--json", status=1))
    assert "No module named 'no_such_module'" in rows[0]["state"]


@pytest.mark.parametrize("group", [each.group for each in TYPES.values()])
def test_a_plugin_of_another_class_is_refused_as_by_its_use(group, capsys, monkeypatch):
    from importlib.metadata import EntryPoint

    from ikkuna.support import plugins

    found = {"bad": (EntryPoint("bad", "collections:Counter", group),)}
    monkeypatch.setattr(plugins, "plugins", lambda asked: found if asked == group else {})
    rows = json.loads(output(capsys, "list", "plugins", "--load", "--json", status=1))
    assert "is the class Counter, expected a subclass of" in rows[0]["state"]
    assert "is the class Counter" in json.loads(output(capsys, "doctor", "--json", status=1))["plugins"]["text"]


def test_kinds_of_a_run_and_of_the_library(run, capsys):
    rows = json.loads(output(capsys, "list", "kinds", run, "--json"))
    stored = read_run(run)
    assert [row["kind"] for row in rows] == [*stored.kinds()]
    assert sum(int(row["values"]) for row in rows) == stored.count
    assert {row["kind"] for row in json.loads(output(capsys, "list", "kinds", "--json"))} == set(BUILT_IN)


def test_the_doctor_measures(capsys):
    report = json.loads(output(capsys, "doctor", "--json"))
    assert report["test measurement"]["state"] == "ok"
    assert report["torch"]["text"]


def test_the_doctor_reports_a_failure(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler was found" in output(capsys, "doctor", status=1)


def test_the_summary_shows_curves_and_heat_maps(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    out = output(capsys, "summary", run)
    assert out.startswith(f"{run}  {read_run(run).count} values to step 40, ")
    dead = [line for line in out.splitlines() if line.startswith("relu3 ")]
    assert dead
    assert {"0"} in [set(line.split()[1]) for line in dead]  # the gradients
    assert max(len(line) for line in out.splitlines()[1:6] if str(run) not in line) <= 90
    assert output(capsys, "summary", run, "--kind", "weights_norm2").count("hidden4") == 1


def test_the_summary_of_a_single_module_shows_its_kinds_and_tells_long_names_apart(tmp_path, capsys):
    logged = [("logged", f"validation_accuracy_at_top_{number}") for number in (1, 5)]
    lines = [
        {"kind": kind, "module": name, "pass": "training", "step": 0, "value": 1.0}
        for kind, name in [*logged, ("weights_norm2", "fc")]
    ]
    (tmp_path / "values.1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run_file(tmp_path, RunFile("1a2b", modules=(ModuleEntry("fc", "Linear"),)))
    out = output(capsys, "summary", tmp_path)
    assert "weights_norm2  1 to 1" in out
    assert len({line[:28] for line in out.splitlines() if line.startswith("logged/")}) == 2


def test_the_summary_is_the_last_value_of_each_series_as_json(run, capsys):
    report = json.loads(output(capsys, "summary", run, "--json"))
    assert report["last_step"] == 40
    assert report["last"]["training"]["loss"][""] == read_run(run).series("loss").values[-1]


@pytest.mark.parametrize("columns", ["1", "20", "500"])
def test_the_summary_is_written_at_any_width_without_unicode(run, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw := io.BytesIO(), "ascii"))
    assert cli.main(["summary", str(run)]) == 0
    out = raw.getvalue()
    assert b"relu3" in out
    assert b"?" not in out.replace(b" ... ", b"")


def test_the_summary_follows_a_run_that_is_written_until_it_is_interrupted(run, tmp_path):
    (file,) = run.glob("events*")
    data = file.read_bytes()
    (tmp_path / file.name).write_bytes(data[:4000])
    reading, writing = pty.openpty()
    command = [sys.executable, "-m", "ikkuna", "summary", str(tmp_path), "--watch", "--interval", "0.05"]
    process = subprocess.Popen(command, stdout=writing, stderr=subprocess.STDOUT)
    os.close(writing)
    seen = b""
    deadline = time.monotonic() + 60
    while b"values to step 40, " not in seen and time.monotonic() < deadline:
        seen += os.read(reading, 65536)
        if b" values to step " in seen:
            (tmp_path / file.name).write_bytes(data)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the end of the terminal; until then a full buffer would block the process
        while os.read(reading, 65536):
            pass
    assert process.wait(30) == 130
    os.close(reading)
    assert b"Traceback" not in seen
    assert seen.count(b" values to step ") >= 2
    assert b" values to step 40, " in seen


def test_tensorboard_is_started_on_a_directory(run, capsys):
    assert f"-m tensorboard.main --logdir {run} --port 6006" in output(capsys, "tensorboard", run, "--dry-run")
    assert cli.main(["tensorboard", "/nowhere"]) == 2
