"""Processes that `torch.multiprocessing` starts from one that is observed: what they receive, and what they leave."""

import json

import pytest
import torch
import torch.multiprocessing
from torch import nn

import ikkuna
from ikkuna.store.json_lines import read

METHODS = [
    pytest.param("fork", marks=pytest.mark.host("a forked process cannot use a device")),
    pytest.param("spawn", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]
STEPS = 12


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def train(model, steps):
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def watch(model, directory):
    return ikkuna.watch(model, preset="economy", every=1, log_dir=directory, backend="jsonl", verbosity=0, rules=False)


def _train_watched(number, directory):
    """Train in a process of its own, which ends without ``close()``; the monitor is referred to until then."""
    torch.set_num_threads(1)
    _train_watched.model = new_model()
    _train_watched.monitor = watch(_train_watched.model, directory)
    train(_train_watched.model, STEPS)


def _train_received(number, model, directory):
    torch.set_num_threads(1)
    train(model, STEPS)
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    weights = [parameter.tolist() for parameter in model.parameters()]
    (directory / "received.json").write_text(json.dumps([hooks, weights]))


@pytest.mark.fault(350)
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_train_have_runs_of_their_own_and_keep_all_values_at_their_end(tmp_path, method):
    torch.multiprocessing.start_processes(_train_watched, (tmp_path,), nprocs=2, start_method=method)
    runs = sorted(tmp_path.glob("run*"))
    assert len(runs) == 2
    with watch(model := new_model(), tmp_path / "closed") as monitor:
        train(model, STEPS)
    for run in runs:
        assert len(read(run)) == len(read(monitor.run_directory))


@pytest.mark.fault(350)
@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_receives_an_observed_model_trains_it_as_without_ikkuna(tmp_path, method):
    model, expected = new_model(), new_model()
    with watch(model, tmp_path / "log") as monitor:
        train(model, 2)
        torch.multiprocessing.start_processes(_train_received, (model, tmp_path), nprocs=1, start_method=method)
        train(model, 1)
    train(expected, 2)
    train(expected, STEPS)
    hooks, weights = json.loads((tmp_path / "received.json").read_text())
    assert weights == [parameter.tolist() for parameter in expected.parameters()]
    assert method == "fork" or hooks == 0
    health = monitor.health()
    assert (health.steps, health.acked_step, health.errors, health.dropped) == (3, 2, 0, 0)
    assert len(list((tmp_path / "log").glob("run*"))) == 1
