"""Every command answers every bad input: with a line and the status 2, or with what can be read and what is missing."""

import contextlib
import json
import logging
import os

import pytest
from tensorboardX import SummaryWriter

from ikkuna import cli
from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.cli.terminal import command_names
from ikkuna.diagnosis import Finding, Findings
from ikkuna.errors import DumpError
from ikkuna.export.attachment import Health
from ikkuna.export.handle import Summary, SummaryTable
from ikkuna.export.replay import Replay
from ikkuna.flight_recorder.dump_reading import DumpRow
from ikkuna.netdict import NetDict
from ikkuna.store.names import Series
from ikkuna.store.values import ModuleEntry
from ikkuna.support.console import announce
from ikkuna.support.failures import error_text, log

NAMES = ("stem", "relu", "head")
STEPS = 12


def backend_with_values(directory, names=NAMES):
    """Return an open backend that has written the values of a small run."""
    directory.mkdir(parents=True, exist_ok=True)
    backend = TensorBoardBackend()
    backend.open(directory)
    backend.describe([ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in names])
    for step in range(STEPS):
        backend.add_scalar(Series("loss"), 1.0 / (step + 1), step)
        for name in names:
            backend.add_scalar(Series("weights_norm2", name), step + 1.0, step)
        backend.commit(step)
    assert backend.flush(10)
    return backend


def stored_run(directory, names=NAMES):
    backend_with_values(directory, names).close()
    return directory


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return stored_run(tmp_path_factory.mktemp("healthy") / "run0001")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch, tmp_path):
    """No display, no colours, and a working directory of its own."""
    for name in ("DISPLAY", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "IKKUNA_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def file_of(directory):
    [file] = directory.glob("events*")
    return file


# -- input that is no run -----------------------------------------------------------------------------------------------


def written(path, data):
    (path / "events.out.tfevents.1").write_bytes(data)
    return path


def pipe(path):
    os.mkfifo(path / "events.out.tfevents.1")
    return path / "events.out.tfevents.1"


def log_directory(path):
    (path / "run0007").mkdir()
    return path


NO_RUN = {
    "missing": (lambda path: path / "missing", "does not exist"),
    "empty": (lambda path: path, "neither an event file nor a file of JSON lines"),
    "a log directory": (log_directory, "run0007' has no value"),
    "an empty file": (lambda path: written(path, b""), "holds no value"),
    "another format": (lambda path: written(path, b"GIF89a" * 100), "holds no value"),
    "zeros": (lambda path: written(path, bytes(4096)), "holds no value"),
    "a pipe": (pipe, "neither a directory nor a file"),
    "no JSON": (lambda path: (path / "values.1.jsonl").write_text("no JSON\n") and path, "holds no value"),
    "a text": (lambda path: (path / "notes.txt").write_text("no run") and path / "notes.txt", "holds no value"),
}
COMMANDS = {
    "check": ["check", "RUN"],
    "summary": ["summary", "RUN"],
    "summary of a kind": ["summary", "RUN", "--kind", "loss"],
    "kinds": ["list", "kinds", "RUN"],
    "why": ["why", "RUN"],
    "report": ["report", "RUN", "-o", "page.html"],
    "report of two": ["report", "HEALTHY", "RUN", "-o", "page.html"],
    "diff from": ["diff", "RUN", "HEALTHY", "-o", "page.html"],
    "diff to": ["diff", "HEALTHY", "RUN", "-o", "page.html"],
    "diff with a repeat": ["diff", "HEALTHY", "HEALTHY", "--repeat", "RUN", "-o", "page.html"],
    "replay": ["replay", "RUN"],
}


def called(arguments, run, healthy, *more):
    names = {"RUN": str(run), "HEALTHY": str(healthy)}
    return cli.main([*(names.get(argument, argument) for argument in arguments), *more])


def test_the_table_has_every_command_that_reads_files():
    without_files = {"demo", "doctor", "mute", "runs", "tensorboard", "ui"}
    assert {arguments[0] for arguments in COMMANDS.values()} == set(command_names()) - without_files


@pytest.mark.parametrize(("make", "text"), NO_RUN.values(), ids=NO_RUN)
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_what_is_no_run_is_refused_in_a_line(arguments, make, text, healthy, tmp_path, capsys):
    (tmp_path / "given").mkdir()
    assert called(arguments, make(tmp_path / "given"), healthy) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("ikkuna: ")
    assert shown.err.count("\n") == 1
    assert ("is not a dump" if arguments[0] == "replay" else text) in shown.err
    assert "internal error" not in shown.err
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("make", [NO_RUN["missing"][0], NO_RUN["a text"][0]], ids=["missing", "a text"])
def test_tensorboard_needs_a_directory(make, tmp_path, capsys):
    assert cli.main(["tensorboard", str(make(tmp_path)), "--dry-run"]) == 2
    assert capsys.readouterr().err.endswith("is not a directory\n")


# -- runs of which something is missing ---------------------------------------------------------------------------------


def half_written(path):
    file = file_of(stored_run(path))
    os.truncate(file, file.stat().st_size - 40)
    return path


def damaged(path):
    file = file_of(stored_run(path))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x55
    file.write_bytes(data)
    return path


def of_another_program(path):
    with SummaryWriter(str(path)) as writer:
        for step in range(STEPS):
            writer.add_scalar("Loss/train", 0.5, step)
            writer.add_scalar("accuracy", 0.5, step)
    return path


def lines_with_a_fault(path):
    path.mkdir()
    entries = [
        json.dumps({"kind": "loss", "module": None, "pass": "training", "step": i, "value": 1}) for i in range(9)
    ]
    (path / "values.1.jsonl").write_text("\n".join([*entries[:4], "{", *entries[4:]]) + "\n")
    return path


PARTIAL = {
    "half written": half_written,
    "damaged": damaged,
    "of another program": of_another_program,
    "lines with a fault": lines_with_a_fault,
    "of another model": lambda path: stored_run(path, ("first", "second")),
}
MISSING = {  # what `summary` and `report` say of it
    "half written": "The last record is incomplete",
    "damaged": "damaged and were skipped",
    "lines with a fault": "damaged and were skipped",
}


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("replay", "summary of a kind")])
def test_what_is_left_of_a_run_is_shown(command, name, healthy, tmp_path, capsys):
    assert called(COMMANDS[command], PARTIAL[name](tmp_path / "given"), healthy) in (0, 1)
    shown = capsys.readouterr()
    assert shown.out
    assert "internal error" not in shown.err
    if name in MISSING and command == "summary":
        assert MISSING[name] in shown.out
    if name in MISSING and command == "report":
        assert MISSING[name].lower() in (tmp_path / "work" / "page.html").read_text().lower()
    if name == "of another model" and command.startswith("diff") and "repeat" not in command:
        assert "different models" in shown.out


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "replay"])
def test_a_run_that_is_being_written_is_read(command, healthy, tmp_path, capsys):
    backend = backend_with_values(tmp_path / "given")
    backend.add_scalar(Series("loss"), 0.5, STEPS)  # not committed
    try:
        assert called(COMMANDS[command], tmp_path / "given", healthy) == 0
    finally:
        backend.close()
    assert "internal error" not in capsys.readouterr().err


# -- names and numbers that cannot be used ------------------------------------------------------------------------------

WRONG = {
    "a command": (["sumary"], "did you mean 'summary'?"),
    "a subscriber": (["list", "subscribers", "NormSubscribr"], "did you mean 'NormSubscriber'?"),
    "a preset": (["list", "presets", "defualt"], "did you mean 'default'?"),
    "a backend": (["list", "backends", "jsonlines"], "did you mean 'jsonl'?"),
    "a rule": (["check", "HEALTHY", "--rules", "dead_unit"], "did you mean 'dead_units'?"),
    "a kind": (["summary", "HEALTHY", "--kind", "weight_norm2"], "did you mean 'weights_norm2'?"),
    "an option": (["report", "HEALTHY", "--otput", "a"], "unrecognized arguments"),
    "no run": (["report"], "there is no directory 'run' here; pass the path of a run"),
    "a list": (["list", "subscriber"], "did you mean 'subscribers'?"),
    "no directory": (["runs"], "'run' is not a directory"),
    "an interval": (["summary", "HEALTHY", "--watch", "--interval", "0"], "--interval needs a positive number"),
    "a tolerance": (["diff", "HEALTHY", "HEALTHY", "--tolerance", "nan"], "--tolerance needs a number of at least 0"),
    "a number": (["diff", "HEALTHY", "HEALTHY", "--tolerance", "much"], "invalid float value: 'much'"),
    "a port": (["tensorboard", ".", "--port", "http"], "invalid int value: 'http'"),
    "no such port": (["tensorboard", ".", "--port", "99999", "--dry-run"], "--port needs a number from 0 to 65535"),
    "steps": (["demo", "--steps", "-1"], "--steps needs a positive number"),
    "a page in no directory": (["report", "HEALTHY", "-o", "no/page.html"], "'no"),
    "a page that is a directory": (["report", "HEALTHY", "-o", "."], "directory"),
    "a difference in no directory": (["diff", "HEALTHY", "HEALTHY", "-o", "no/page.html"], "'no"),
    "a script": (["replay", "HEALTHY", "--script", "x"], "is not a dump"),
}


@pytest.mark.parametrize(("arguments", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(arguments, text, healthy, tmp_path, capsys):
    assert called(arguments, healthy, healthy) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("ikkuna: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert "internal error" not in shown.err
    assert not list((tmp_path / "work").iterdir())


# -- names and texts that control a terminal ----------------------------------------------------------------------------

HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\u202egnp\0\r\nikkuna: forged\ud800"
FOREIGN = Finding(
    HOSTILE, "error", HOSTILE, HOSTILE, HOSTILE, 1, 1.0, HOSTILE, modules=(HOSTILE,), consequences=(HOSTILE,)
)
OUTPUTS = {
    "finding": FOREIGN,
    "findings": Findings([FOREIGN], [HOSTILE], {HOSTILE: HOSTILE}),
    "replay": Replay(1, 0, (FOREIGN,), (), 2, 1, (0.5, 0.5), (HOSTILE,)),
    "row": DumpRow(HOSTILE, HOSTILE, HOSTILE),
    "summary": Summary([HOSTILE], [SummaryTable(HOSTILE, (HOSTILE,), [(HOSTILE,)])]),
    "page": Summary([HOSTILE], [SummaryTable(HOSTILE, (HOSTILE,), [(HOSTILE,)])])._repr_html_(),
    "weights": NetDict({HOSTILE: 1.0}),
    "error": DumpError(HOSTILE),
    "health": Health(0, 0, 0, 0, (HOSTILE,), (HOSTILE,), 0, 0.0, 0, 0, 0, {HOSTILE: 1.0}),
    "text": error_text(ValueError(HOSTILE)),
}


def controls(text):
    """Return the characters other than line feeds that could control a terminal, and whether a line of another source appears."""
    return {c for c in text if c != "\n" and not c.isprintable()}, "\nikkuna: forged" in text


@pytest.mark.fault(340)
@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_the_text_of_an_object_controls_no_terminal(output):
    assert controls(str(output)) == (set(), isinstance(output, DumpError))


@pytest.mark.fault(340)
@pytest.mark.parametrize("arguments", [*COMMANDS.values()], ids=COMMANDS)
def test_names_in_a_file_control_no_terminal(arguments, tmp_path, capsys):
    """Only the three names of a healthy run and the kinds of metrics are legible."""
    runs = [tmp_path / name for name in ("one", "two")]
    for number, directory in enumerate(runs):
        directory.mkdir()
        values = [
            {"kind": kind, "module": name, "pass": HOSTILE, "step": step, "value": number + 1 / (step + 1)}
            for step in range(STEPS)
            for kind in ("weights_norm2", HOSTILE)
            for name in (HOSTILE, None)
        ]
        lines = [json.dumps(value) for value in values]
        (directory / "values.0000000001.h.1.000.jsonl").write_text("\n".join([*lines, "damaged", ""]))
    called(arguments, *runs)
    shown = capsys.readouterr()
    assert controls(shown.out + shown.err) == (set(), False)


@pytest.mark.fault(340)
@pytest.mark.parametrize("level", ["warning", "exception"])
def test_a_log_line_controls_no_terminal(level, capsys):
    handler = logging.StreamHandler()
    log.logger.addHandler(handler)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        getattr(log, level)("%s failed: %s, %r, %d", HOSTILE, error, HOSTILE, 3)
        log.warning(HOSTILE.replace("\n", ""))
    finally:
        log.logger.removeHandler(handler)
    announce(HOSTILE)
    shown = capsys.readouterr().err
    assert "3" in shown
    assert controls(shown)[0] == set()


# -- terminals ----------------------------------------------------------------------------------------------------------

TERMINALS = {
    "no colour": {"NO_COLOR": "1", "FORCE_COLOR": "1"},
    "no width": {"COLUMNS": "20"},
    "no abilities": {"TERM": "dumb", "FORCE_COLOR": "1"},
}
LISTS = {name: ["list", name] for name in ("backends", "plugins", "presets", "subscribers")}


@pytest.mark.parametrize("environment", TERMINALS.values(), ids=TERMINALS)
@pytest.mark.parametrize("arguments", [*COMMANDS.values(), *LISTS.values()], ids=[*COMMANDS, *LISTS])
def test_any_terminal_is_served(arguments, environment, healthy, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert called(arguments, healthy, healthy) == (2 if arguments[0] == "replay" else 0)
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "internal error" not in shown.err


@pytest.mark.parametrize("arguments", [*COMMANDS.values(), *LISTS.values()], ids=[*COMMANDS, *LISTS])
def test_a_process_without_standard_streams_runs_each_command(arguments, healthy):
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        assert called(arguments, healthy, healthy) == (2 if arguments[0] == "replay" else 0)


def test_the_summary_keeps_to_the_width_of_the_terminal(healthy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    cli.main(["summary", str(healthy)])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith((*NAMES, "loss"))]
    assert len(rows) == 1 + len(NAMES)
    assert max(map(len, rows)) <= 56  # the label and a curve of at least eight characters
