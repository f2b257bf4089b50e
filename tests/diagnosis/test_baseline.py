"""A baseline of healthy runs: other healthy runs agree with it, and faults that no rule names depart from it."""

import json
import os
import random
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna.cli import main
from ikkuna.diagnosis.baseline import Baseline, check_baseline, learn
from ikkuna.errors import ConfigError
from ikkuna.reading import read_run
from tests.diagnosis.test_hostile_dumps import mutated, mutated_arrays

STEPS = 120
LEARNED, OTHERS = range(6), range(100, 110)


def train(
    log_dir,
    seed,
    *,
    rate=0.05,
    momentum=0.9,
    noise=0.0,
    scale=1.0,
    gain=1.0,
    frozen=None,
    decay=0.0,
    rows=32,
    act=nn.ReLU,
    steps=STEPS,
):
    """Train a small classifier; every named argument plants a fault."""
    torch.manual_seed(seed)
    x = torch.randn(512, 8)
    y = (x[:, :2].sum(1) > 0).long() + (x[:, 2] > 0.5)
    if noise:
        y = torch.where(torch.rand(512) < noise, torch.randint(0, 3, (512,)), y)
    model = nn.Sequential(nn.Linear(8, 24), act(), nn.Linear(24, 24), act(), nn.Linear(24, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    if frozen is not None:
        model[frozen].requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), rate, momentum, weight_decay=decay)
    loss = nn.CrossEntropyLoss()
    with ikkuna.watch(model, loss=loss, log_dir=log_dir, rules=False, recorder=False, every=4, verbosity=0) as watched:
        for _ in range(steps):
            chosen = torch.randint(0, 512, (rows,))
            optimizer.zero_grad()
            loss(model(x[chosen] * scale), y[chosen]).backward()
            optimizer.step()
    return watched.run_directory


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return [train(tmp_path_factory.mktemp("healthy"), seed) for seed in LEARNED]


@pytest.fixture(scope="module")
def baseline(healthy, tmp_path_factory):
    return learn(healthy).write(tmp_path_factory.mktemp("file") / "baseline.npz")


def test_other_healthy_runs_agree(baseline, tmp_path):
    departing = [str(found) for seed in OTHERS if (found := check_baseline(train(tmp_path, seed), baseline))]
    assert not departing


FAULTS = {
    "rate": {"rate": 0.5},
    "small rate": {"rate": 0.005},
    "no momentum": {"momentum": 0.0},
    "wrong labels": {"noise": 0.5},
    "not normalised": {"scale": 20.0},
    "initialisation": {"gain": 3.0},
    "frozen": {"frozen": 2},
    "decay": {"decay": 0.1},
    "batch size": {"rows": 2},
    "activation": {"act": nn.Sigmoid},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_departs(baseline, tmp_path, fault):
    found = check_baseline(train(tmp_path, 50, **FAULTS[fault]), baseline)
    assert {finding.rule for finding in found} == {"departs_from_baseline"}


def test_the_finding_names_kind_module_and_step(baseline, tmp_path):
    """A rate that is ten times larger makes larger updates from the first step on."""
    [finding] = [each for each in check_baseline(train(tmp_path, 50, rate=0.5), baseline) if "updates" in each.kind]
    assert (finding.step, finding.kind) == (0, "weight_updates_weights_ratio")
    assert {"0", "2"} <= set(finding.modules)


def test_a_run_without_a_layer_lacks_its_values(baseline, healthy):
    stored = Baseline.read(baseline)
    keys = [(kind, name.replace("4", "5"), pass_name) for kind, name, pass_name in stored.keys]
    found = check_baseline(healthy[0], replace(stored, keys=keys))
    assert [finding.module for finding in found] == ["5"]
    assert "no values in this run" in found[0].message


def test_a_run_that_ended_early_is_judged_as_far_as_it_went(baseline, tmp_path):
    found = check_baseline(train(tmp_path, 60, steps=30), baseline)
    assert not found
    assert "compared with 6 healthy runs" in found.note


def test_values_that_are_not_finite_depart(baseline, tmp_path):
    found = check_baseline(train(tmp_path, 60, rate=1e6), baseline)
    assert any(finding.value == np.inf for finding in found)


def test_learned_runs_agree_with_their_baseline(baseline, healthy):
    known = Baseline.read(baseline)
    assert all(not check_baseline(run, known) for run in healthy)
    _, scores = known.judge(read_run(healthy[0]))
    assert np.nanmax(scores) <= 1.0 + 1e-5


def test_the_commands(baseline, healthy, tmp_path, capsys):
    file = tmp_path / "learned.npz"
    assert main(["check", *map(str, healthy), "--learn", "-o", str(file)]) == 0
    assert "6 runs up to step 116" in capsys.readouterr().out
    assert main(["check", str(healthy[0]), "--baseline", str(file)]) == 0
    capsys.readouterr()
    assert main(["check", str(train(tmp_path, 50, gain=3.0)), "--baseline", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["rule"] == "departs_from_baseline"
    assert main(["check", *map(str, healthy)]) == 2


@pytest.mark.parametrize("content", [b"", b"PK", b"not a file of numpy", None])
def test_another_file_is_an_error(healthy, tmp_path, content, capsys):
    path = tmp_path / "baseline.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="baseline"):
        check_baseline(healthy[0], path)
    assert main(["check", str(healthy[0]), "--baseline", str(path)]) == 2


def test_mutated_files_raise_documented_errors_only(baseline, healthy, tmp_path, capsys):
    """Every file is refused with a documented error, or gives findings that can be shown."""
    rng, data, path = random.Random(5), baseline.read_bytes(), tmp_path / "baseline.npz"
    refused = 0
    for number in range(300):
        path.write_bytes((mutated if number % 3 else mutated_arrays)(data, rng))
        try:
            check_baseline(healthy[0], path)
        except ConfigError:
            refused += 1
        main(["check", str(healthy[0]), "--baseline", str(path)])
        written = capsys.readouterr()
        assert (written.out + written.err).replace("\n", "").isprintable()
    assert refused > 150


@pytest.mark.parametrize("name", ["a pipe", "a device", "ten gigabytes", "a type that runs code"])
def test_a_file_made_to_harm_its_reader_is_refused(healthy, tmp_path, name):
    path = tmp_path / "baseline.npz"
    if name == "a pipe":
        os.mkfifo(path)
    elif name == "a device":
        path.symlink_to("/dev/zero")
    elif name == "ten gigabytes":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("kinds.npy", "w") as file:
            header = {"descr": "<f8", "fortran_order": False, "shape": (10 * 2**30 // 8,)}
            np.lib.format.write_array_header_1_0(file, header)
    else:
        np.savez(path, kinds=np.array([print], object))
    with pytest.raises(ConfigError, match="cannot be read as a baseline"):
        check_baseline(healthy[0], path)


def test_two_runs_are_too_few(healthy):
    with pytest.raises(ConfigError, match="at least 3 healthy runs, got 2"):
        learn(healthy[:2])


def test_a_run_counts_once(healthy):
    with pytest.raises(ConfigError, match="needs different runs, .* is given twice"):
        learn([*healthy[:2], healthy[0].parent / "." / healthy[0].name])
