"""A program that ends with an exception: the run names it, its step and the module, wherever one looks."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.cli.program import main
from ikkuna.diagnosis.check import check
from ikkuna.errors import StopTraining
from ikkuna.support.modules import NamedModule
from ikkuna.support.process_hooks import raised_in

PROGRAM = """
import torch, ikkuna
from torch import nn
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Sequential(nn.Linear(20, 3)))
optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()
ikkuna.watch(model, loss=loss, log_dir="runs", verbosity=0)
for step in range(60):
    x = torch.randn(16, {columns} if step == {fails} else 10)
    optimizer.zero_grad()
    loss(model(x), torch.randint(0, {classes}, (16,))).backward()
    optimizer.step()
"""


def ended(directory, fails=55, columns=11, classes=3):
    """Run the program in a directory; return what it wrote to the standard error stream."""
    source = textwrap.dedent(PROGRAM).format(fails=fails, columns=columns, classes=classes)
    (directory / "program.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "program.py"], check=False, cwd=directory, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "Traceback (most recent call last):" in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def ended_at_once(tmp_path_factory):
    """The directory of a program that ends in its first step."""
    directory = tmp_path_factory.mktemp("ended")
    ended(directory, 0)
    return directory


@pytest.mark.parametrize("fails", [0, 1, 55])
def test_check_names_the_exception_the_step_the_module_and_the_line(fails, ended_at_once, tmp_path, capsys):
    directory = tmp_path if fails else ended_at_once
    if fails:
        ended(directory, fails)
    assert main(["check", str(directory / "runs"), "--json"]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["rule"], finding["severity"]) == ("ended_by_exception", "error")
    assert (finding["step"], finding["module"], finding["class_name"]) == (fails, "0", "Linear")
    assert (
        "In this step: RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x11 and 10x20) (program.py:10)."
        in finding["message"]
    )


@pytest.mark.parametrize("command", ["summary", "report", "runs", "why"])
def test_the_other_commands_read_such_a_run(command, ended_at_once, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([command, str(ended_at_once / "runs")]) == 0
    told = (tmp_path / "report.html").read_text() if command == "report" else capsys.readouterr().out
    assert command == "why" or "ended_by_exception" in told


def test_an_exception_after_a_step_is_told_of_this_step(tmp_path):
    model, run = watched(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(KeyError), run:
        raise KeyError("label")
    [finding] = [each for each in run.findings if each.rule == "ended_by_exception"]
    assert (finding.step, "After this step: KeyError: 'label'" in finding.message) == (29, True)


def test_an_exception_outside_of_the_model_has_no_module(tmp_path):
    ended(tmp_path, -1, classes=4)
    [finding] = check(tmp_path / "runs" / "run0001")
    assert finding.module is None
    assert "Target 3 is out of bounds" in finding.message


def watched(directory, **options):
    model = nn.Linear(3, 2)
    return model, ikkuna.watch(model, log_dir=str(directory), verbosity=0, **options)


@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        (KeyError("label"), {}, ["ended_by_exception"]),
        (KeyError("label"), {"mute": ["ended_by_exception"]}, []),
        (KeyError("label"), {"rules": False}, []),
        (KeyboardInterrupt(), {}, []),
        (StopTraining(None), {}, []),
    ],
    ids=str,
)
def test_an_exception_that_leaves_the_with_block(error, options, expected, tmp_path):
    model, run = watched(tmp_path, **options)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(type(error)), run:
        raise error
    assert [finding.rule for finding in run.findings] == expected


class Inner(nn.Module):
    def forward(self, x):
        return x.view(7)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        if x.ndim == 3:
            raise ValueError("three axes")
        return self.inner(x)


def raising_hook(module, arguments):
    raise OSError("no space")


@pytest.mark.parametrize(
    ("shape", "hooked", "module"),
    [((2, 2), None, "inner"), ((1, 1, 1), None, ""), ((7,), "inner", "inner"), ((7,), "", "")],
)
def test_the_innermost_module_is_named(shape, hooked, module):
    model = Outer()
    if hooked is not None:
        model.get_submodule(hooked).register_forward_pre_hook(raising_hook)
    named = [NamedModule("", model), NamedModule("inner", model.inner)]
    with pytest.raises((RuntimeError, ValueError, OSError)) as raised:
        model(torch.ones(shape))
    place = {"inner": "return x.view(7)", "": 'raise ValueError("three axes")'}[module]
    place = 'raise OSError("no space")' if hooked is not None else place
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == place)
    assert raised_in(raised.value, named) == (module, f"test_crash.py:{number}")
    assert raised_in(raised.value, []) == (None, f"test_crash.py:{number}")
    assert raised_in(ValueError("never raised"), named) == (None, "")
