"""The template for plugins is installed like any other package, and works."""

import shutil
import tomllib

import pytest

from tests.plugins.children import ROOT, answer_of, run_python

PROJECT = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A directory with the installed project, and a copy of its sources."""
    work = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PROJECT, work / "project", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    # the imports of pip cause warnings
    run_python(
        *("-W", "ignore", "-m", "pip", "install", "--quiet", *offline, "--target", str(work / "site"), "./project"),
        cwd=work,
    )
    return work / "site"


USE = """
import json
import torch
from torch import nn
from ikkuna.export import Exporter
from ikkuna.export.subscriber import NearZeroSubscriber
from ikkuna.store.json_lines import read

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
expected = []
with Exporter(log_dir="run") as exporter:
    exporter.add_modules(model)
    exporter.message_bus.register_subscriber(NearZeroSubscriber("weights", eps=0.1, subsample=2, backend="jsonl"))
    for step in range(5):
        expected += [[step, name, (model[int(name)].weight.detach().numpy() ** 2 < 0.01).mean()] for name in "02" if step % 2 == 0]
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    directory = exporter.message_bus.run.directory
got = [[entry["step"], entry["module"], entry["value"]] for entry in read(directory) if entry["kind"] == "weights_near_zero"]
print(json.dumps([NearZeroSubscriber.__module__, expected, got]))
"""


def test_an_installed_plugin_is_imported_by_its_name_and_its_values_are_stored(site, tmp_path):
    module, expected, got = answer_of(USE, site, cwd=tmp_path)
    assert module == "ikkuna_near_zero.near_zero"
    assert [step for step, _, _ in got] == [0, 0, 2, 2, 4, 4]
    assert got == expected
    assert any(0 < value < 1 for _, _, value in got)


RULE = """
import json
import torch
from torch import nn
import ikkuna
from ikkuna.diagnosis.check import check

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
nn.init.constant_(model[2].weight, 1e-5)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
with ikkuna.watch(model, log_dir="run") as exporter:
    for step in range(31):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    directory = exporter.message_bus.run.directory
stored = check(directory)
print(json.dumps([[[f.rule, f.module, f.step, round(f.value, 6)] for f in found if f.rule == "mostly_zero"]
                  for found in (exporter.findings, stored)]))
"""


def test_the_rule_of_an_installed_plugin_judges_while_a_model_trains_and_afterwards(site, tmp_path):
    live, stored = answer_of(RULE, site, cwd=tmp_path)
    assert live == stored == [["mostly_zero", "2", 0, 1.0]]


def test_the_command_applies_the_rule_of_an_installed_plugin(site, tmp_path):
    answer_of(RULE, site, cwd=tmp_path)
    command = "import sys; from ikkuna.cli import main; sys.exit(main(['check', 'run/run0001', '--rules', 'mostly_zero']) - 1)"
    out = run_python("-c", command, paths=(site,), cwd=tmp_path)
    assert "mostly_zero  2" in out


def test_its_own_tests_pass(site):
    run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", paths=(site,), cwd=site.parent / "project")


def test_its_wheel_holds_the_package_and_the_entry_point(site):
    [metadata] = site.glob("*.dist-info")
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert metadata.name.startswith(f"{declared['name'].replace('-', '_')}-{declared['version']}")
    assert "NearZeroSubscriber" in (metadata / "entry_points.txt").read_text()
    assert sorted(path.name for path in site.iterdir() if path.is_dir() and path != metadata) == ["ikkuna_near_zero"]
