"""The program finds its commands, writes no traceback, and returns 0, 1 or 2."""

import inspect
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ikkuna import cli
from ikkuna.cli import commands
from ikkuna.cli.terminal import Terminal, command_names, load_command
from ikkuna.version import __version__

NAMES = command_names()


def run(*arguments, **environment):
    command = [sys.executable, "-m", "ikkuna", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_help_imports_no_heavy_package():
    code = """if True:
        import sys
        from ikkuna.cli import main
        assert main(["--help"]) == 0
        print({"torch", "numpy", "matplotlib", "tensorboardX", "jinja2"} & set(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


def test_help_lists_every_command_close_to_its_name(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["ikkuna", "--help"])
    assert cli.main() == 0
    out = capsys.readouterr().out
    for name in NAMES:
        summary = load_command(name).__doc__.partition("\n")[0].removesuffix(".")
        assert f"\n    {name:{max(map(len, NAMES))}}   {summary[0].lower()}{summary[1:]}\n" in out


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_help_of_its_own(name, capsys):
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ikkuna {name}")
    assert len(out.splitlines()) > 4
    summary, _, description = inspect.getdoc(load_command(name)).partition("\n\n")
    assert out.partition("\n\n")[2].split()[:5] == (description or summary).split()[:5]


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ikkuna {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["chek"], "unknown command 'chek'; did you mean 'check'?"),
        (["diff"], "the following arguments are required: A, B; see 'ikkuna diff --help'"),
        (["check", "--jso", "."], "unrecognized arguments: --jso"),
        (["--vers"], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments_return_2_and_a_line(arguments, text, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ikkuna: ")
    assert text in error
    assert error.count("\n") == 1


def test_options_may_stand_between_arguments(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["diff", "no", "--json", "neither", "--tolerance=1"]) == 2
    assert "'no'" in capsys.readouterr().err


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Return a function that adds a command whose ``run`` has the given body."""

    def add(name, body):
        code = f"""'A command of the test.'
from ikkuna.errors import ConfigError
from ikkuna.support.failures import log
def run(options, terminal):
    {body}
"""
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
        return name

    yield add
    for name in [name for name in sys.modules if name.startswith(f"{commands.__name__}.zz_")]:
        del sys.modules[name]


def test_a_new_module_is_a_new_command(added, capsys):
    name = added("zz_new", "terminal.write('Ä done'); return 1")
    assert name in command_names()
    assert cli.main([name]) == 1
    assert capsys.readouterr().out == "Ä done\n"
    assert cli.main([name, "--help"]) == 0
    assert "\n\nA command of the test.\n\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("raise ConfigError('no such run')", 2, "ikkuna: no such run\n"),
        ("open('/nowhere/at/all')", 2, "ikkuna: [Errno 2] No such file or directory: '/nowhere/at/all'\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("log.warning('%d lines', 3); return 0", 0, "ikkuna: 3 lines\n"),
    ],
)
def test_exceptions_become_a_line_and_a_status(added, body, status, error, capsys):
    assert cli.main([added("zz_failing", body)]) == status
    assert capsys.readouterr().err == error


def test_an_unexpected_exception_names_the_way_to_its_traceback(added, capsys, monkeypatch):
    name = added("zz_broken", "return 1 / 0")
    monkeypatch.delenv("IKKUNA_TRACEBACK", raising=False)
    assert cli.main([name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ikkuna: internal error: ZeroDivisionError: division by zero")
    assert error.count("\n") == 1
    monkeypatch.setenv("IKKUNA_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main([name])


def test_a_reader_that_ends_early_causes_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "ikkuna", "--help"]
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_written_to_a_reader_that_has_ended(monkeypatch):
    class Ended(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", ended := Ended())
    assert cli.main(["list", "presets"]) == 0
    assert sys.stdout is not ended
    sys.stdout.close()


def test_an_encoding_without_these_characters_replaces_them():
    raw = io.BytesIO()
    terminal = Terminal(io.TextIOWrapper(raw, "ascii"))
    assert terminal.can_write("abc")
    assert not terminal.can_write("█")
    terminal.write("a█")
    terminal.flush()
    assert raw.getvalue() == b"a?\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "x"), ({"FORCE_COLOR": "1"}, "\x1b[1;31mx\x1b[0m"), ({}, "x")],
)
def test_colours_follow_the_environment(environment, expected, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(out := io.StringIO())
    terminal.write(terminal.styled("x", "bold", "red"))
    assert out.getvalue() == f"{expected}\n"


def test_the_installed_command_is_the_same_program_and_imports_no_compiler():
    error = run("check", "/nowhere", "--rules", "default", PYTHONPROFILEIMPORTTIME="1").stderr
    assert error.endswith("\nikkuna: '/nowhere' does not exist\n")
    assert "ikkuna.observation.hooks.context" in error
    assert "torch._dynamo" not in error  # it would take two seconds


@pytest.fixture
def values(tmp_path):
    """The path of a file with one value."""
    path = tmp_path / "values.jsonl"
    path.write_text('{"kind": "loss", "module": null, "pass": "training", "step": 0, "value": 1.0}\n')
    return str(path)


@pytest.mark.parametrize(
    ("severities", "status"),
    [((), 0), (("info",), 0), (("warning",), 1), (("info", "error"), 1), (("info", "info"), 0)],
)
@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ([], (None, False)),
        (["--muted"], (None, True)),
        (["--rules", "a"], (["a"], False)),
        (["--rules", "a,b", "--muted"], (["a", "b"], True)),
    ],
)
def test_a_check_returns_1_for_a_warning_or_an_error(severities, status, options, passed, values, monkeypatch, capsys):
    from ikkuna.diagnosis import Finding, Findings

    found = Findings(
        [Finding("r", each, "It is so.") for each in severities], ["r"], {"s": "why"}, {"s": "n"}, "A note."
    )
    calls = []
    monkeypatch.setattr("ikkuna.diagnosis.check.check", lambda *arguments: calls.append(arguments) or found)
    assert cli.main(["check", values, *options]) == status
    assert calls == [(values, *passed)]
    assert capsys.readouterr().out.splitlines() == [line.rstrip() for line in found.lines()]
    assert cli.main(["check", values, *options, "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert [finding["severity"] for finding in report.pop("findings")] == [each.severity for each in found]
    assert report == {"judged": ["r"], "skipped": {"s": "why"}, "needed": {"s": "n"}, "note": "A note."}


def test_a_check_learns_from_runs_and_compares_one_with_what_was_learned(values, monkeypatch, capsys):
    from ikkuna.diagnosis import Findings

    learned = SimpleNamespace(keys="abcd", runs=2, edges=[0, 10, 21], limit=3.14159, write=lambda output: f"<{output}>")
    calls = []
    monkeypatch.setattr("ikkuna.diagnosis.baseline.learn", lambda runs: calls.append(runs) or learned)
    monkeypatch.setattr(
        "ikkuna.diagnosis.baseline.check_baseline", lambda run, path: calls.append((run, path)) or Findings()
    )
    for options, name in (([], "baseline.npz"), (["-o", "x.npz"], "x.npz")):
        assert cli.main(["check", values, values, "--learn", *options]) == 0
        text = f"wrote <{name}>: 4 series of 2 runs up to step 20; the limit of the score is 3.14"
        assert capsys.readouterr().out.strip() == text
    assert cli.main(["check", values, "--baseline", "x.npz"]) == 0
    assert calls == [[values, values]] * 2 + [(values, "x.npz")]
    assert cli.main(["check", values, values]) == 2
    assert "without --learn, check needs one run, got 2" in capsys.readouterr().err
