"""The examples of trainers run, show what the plain loop shows, and continue after ``kill -9``."""

import os
import random
import runpy
import signal
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ikkuna.store.json_lines import read
from tests.plugins.children import ROOT

EXAMPLES = ROOT / "examples" / "trainers"
TRAINERS = sorted(path.stem for pattern in ("with_*.py", "torchrun_*.py") for path in EXAMPLES.glob(pattern))
KINDS = ("weights_norm2", "layer_gradients_norm2", "activations_variance", "weight_updates_weights_ratio", "loss")
RUN_AND_DIE = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

script, last, rank, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], []

def count(*unused):
    steps.append(None)
    if len(steps) == last and os.environ.get("RANK", rank) == rank:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


def values(directory):
    return {
        (entry["kind"], entry["module"], entry["step"]): entry["value"]
        for entry in read(directory)
        if entry.get("kind") in KINDS and "value" in entry
    }


def run(name, cwd, last=0):
    """Run an example, of which one process kills itself after `last` steps, if that is not 0; return whether it ended well."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "subscribers")))
    script = cwd / "run_and_die.py"
    script.write_text(RUN_AND_DIE, encoding="utf-8")
    is_parallel = name.startswith("torchrun_")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if is_parallel else []
    done = subprocess.run(
        [sys.executable, *launcher, script, EXAMPLES / f"{name}.py", str(last), str(random.randint(0, 1))],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
    )
    is_killed = "SIGKILL" in done.stderr if is_parallel else done.returncode == -signal.SIGKILL
    assert done.returncode == 0 or is_killed, done.stderr
    return done.returncode == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return values(trained("plain_loop", tmp_path_factory.mktemp("plain")))


def trained(name, cwd):
    """Run an example in this process; return the directory of its run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        sys.modules.pop("task", None)
    [directory] = (cwd / "run").iterdir()
    return directory


@pytest.mark.parametrize("name", ["with_accelerate", "with_fabric", "with_ignite", "with_skorch"])
def test_a_trainer_shows_the_values_of_the_plain_loop(name, plain, tmp_path):
    assert {kind for kind, *_ in plain} == set(KINDS)
    assert [step for kind, _, step in plain if kind == "loss"] == list(range(32))
    assert values(trained(name, tmp_path)) == plain


def test_a_summary_writer_and_a_function_get_the_values(plain, tmp_path, capsys):
    assert values(trained("log_to_summary_writer", tmp_path)) == plain
    reader = EventAccumulator(str(tmp_path / "my_run")).Reload()
    found = {event.step: event.value for event in reader.Scalars("Network/loss")}
    assert found == pytest.approx({step: value for (kind, _, step), value in plain.items() if kind == "loss"})
    assert f"step 24: loss {plain['loss', None, 24]:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_have_at_most_30_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log_to_wandb", "log_to_mlflow"])
def test_a_tracker_shows_the_values_of_the_plain_loop(name, plain, tmp_path, monkeypatch):
    pytest.importorskip(name.removeprefix("log_to_"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    assert run(name, tmp_path)
    assert values(tmp_path / "run" / "digits") == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_loop", *TRAINERS])
def test_a_killed_training_continues_its_curves(name, tmp_path):
    """The process dies at a random step; the resumed run has the tags, steps and values of one that was never killed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert run(name, whole)
    assert not run(name, killed, random.randint(10, 31))
    assert run(name, killed)
    found = [directory.name for directory in (killed / "run").iterdir() if directory.name.startswith("run")]
    assert found == ["run0001"]
    expected = values(whole / "run" / "run0001")
    assert [step for kind, _, step in expected if kind == "loss"] == list(range(32))
    assert values(killed / "run" / "run0001") == expected
    places = ["run/run0001"] if name != "with_lightning" else ["run/run0001", "lightning_logs/version_0"]
    for place in places:
        curves = [scalars(top / place) for top in (whole, killed)]
        assert curves[0]["Network/loss"]
        assert curves[1] == curves[0]


def scalars(directory):
    """Return what TensorBoard reads of the kinds: the steps and values of each tag."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in reader.Tags()["scalars"] if tag.partition("/")[0] in KINDS or tag == "Network/loss"]
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in sorted(tags)}
