"""The examples of the gallery run and write the files that they return."""

import importlib
import sys
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parents[2] / "examples" / "inspection"
EXAMPLES = sorted(path.stem for path in DIRECTORY.glob("ex*.py"))
QUICK = ("ex07", "ex11", "ex12")


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(DIRECTORY))


def test_there_are_thirteen():
    assert [name[2:4] for name in EXAMPLES] == [f"{i:02}" for i in range(1, 14)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n.startswith(QUICK) else pytest.mark.slow) for n in EXAMPLES]
)
def test_example(name, tmp_path, monkeypatch, capsys):
    networks = _networks(monkeypatch)
    train = networks.train
    monkeypatch.setattr(networks, "train", lambda model, iterations, **o: train(model, 2, **{**o, "timesteps": 20}))
    for module in [name, "ex03_all_samples"]:
        monkeypatch.delitem(sys.modules, module, raising=False)
    paths = importlib.import_module(name).main(tmp_path)
    assert sorted(path.name for path in paths) == sorted(path.name for path in tmp_path.iterdir())
    assert all(path.stat().st_size > 5_000 for path in paths)


def _networks(monkeypatch):
    """Import `networks` from the examples; the tests have a module of the same name."""
    monkeypatch.delitem(sys.modules, "networks", raising=False)
    module = importlib.import_module("networks")
    monkeypatch.setitem(sys.modules, "networks", module)
    return module
