"""The first difference between two runs is found, and noise is none."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.reading import read_run
from ikkuna.report.difference import compare_paths, compare_runs


def train(directory, change=None, steps=30, width=8):
    """Write a run; at step 20 something may change."""
    from ikkuna.export.subscriber import LearningRateSubscriber, LossSubscriber, NormSubscriber

    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential()
    for name, module in [
        ("stem", nn.Linear(4, width)),
        ("act", nn.Tanh()),
        ("body", nn.Linear(width, 8)),
        ("head", nn.Linear(8, 3)),
    ]:
        model.add_module(name, module)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)
    kinds = "activations", "layer_gradients", "weights", "weight_updates"
    subscribers = LossSubscriber(), LearningRateSubscriber(), *(NormSubscriber(kind) for kind in kinds)
    with ikkuna.watch(model, *subscribers, loss=loss, log_dir=directory, rules=None):
        for step in range(steps):
            x, y = torch.randn(16, 4, generator=draw), torch.randint(0, 3, (16,), generator=draw)
            optimizer.zero_grad()
            if step == 20 and change == "data":
                x = x + 1
            if step == 20 and change == "rate":
                optimizer.param_groups[0]["lr"] = 0.2
            if step == 20 and change == "body":
                model.body.weight.data.mul_(1.5)
            loss(model(x), y).backward()
            if step == 20 and change == "gradient":
                model.body.weight.grad.mul_(2.0)
            optimizer.step()
    (run,) = directory.iterdir()
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return train(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("change", "kind", "module"),
    [
        ("data", "activations_norm2", "stem"),
        ("rate", "learning_rate", "group 0"),
        ("body", "activations_norm2", "body"),
        ("gradient", "weight_updates_norm2", "body"),
    ],
)
def test_the_first_step_layer_and_kind_are_found(base, change, kind, module, tmp_path):
    found = compare_runs(read_run(base), read_run(train(tmp_path, change)))
    first = found.partings[0]
    assert (first.step, first.kind) == (20, kind)
    assert first.module in (module, None) if kind == "learning_rate" else first.module == module
    assert {parting.step for parting in found.partings} <= set(range(20, 30))
    assert found.is_same_model


def test_equal_runs_do_not_differ(base, tmp_path, capsys):
    found = compare_runs(read_run(base), read_run(train(tmp_path)))
    assert not found.partings
    assert found.compared > 10
    (other,) = tmp_path.iterdir()
    assert cli.main(["diff", str(base), str(other)]) == 0
    assert "differs beyond the noise" in capsys.readouterr().out


def test_one_flipped_bit_is_found_by_fingerprints(tmp_path):
    """The lowest bit of one weight leaves its norm within the noise; the finding is the tensor at the next sample."""
    from ikkuna.export.subscriber import FingerprintSubscriber, NormSubscriber

    runs = []
    for flips in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(6, 4)
        optimizer, log_dir = torch.optim.SGD(model.parameters(), 1e-3), tmp_path / str(flips)
        subscribers = FingerprintSubscriber(["weights", "biases"]), NormSubscriber("weights")
        with ikkuna.watch(model, *subscribers, log_dir=log_dir, rules=None):
            for step in range(12):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if flips and step == 5:
                    model[2].weight.data.view(torch.int32)[1, 2] ^= 1
        runs.append(read_run(next(log_dir.iterdir())))
    first, *others = compare_runs(*runs).partings
    assert (first.step, first.kind, first.module) == (6, "weights_fingerprint", "2")
    assert {parting.kind for parting in others} <= {"weights_fingerprint", "biases_fingerprint"}
    assert not compare_runs(runs[0], runs[0]).partings


def write(directory, values, kind="loss"):
    directory.mkdir()
    entries = [{"kind": kind, "module": None, "pass": "training", "step": i, "value": v} for i, v in enumerate(values)]
    (directory / "values.1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return directory


def noisy(seed, jump=None):
    values = 1 + 0.05 * np.random.default_rng(seed).normal(size=60)
    if jump is not None:
        values[jump:] += 3
    return values.tolist()


def test_repeats_measure_the_noise(tmp_path):
    first, same, repeat, jumped = (
        read_run(write(tmp_path / name, values))
        for name, values in [("a", noisy(1)), ("b", noisy(2)), ("r", noisy(3)), ("j", noisy(4, 40))]
    )
    assert [p.step for p in compare_runs(first, same).partings] == [0]
    assert not compare_runs(first, same, [repeat]).partings
    assert [p.step for p in compare_runs(first, jumped, [repeat]).partings] == [40]


def test_small_differences_before_a_step_are_its_noise(tmp_path):
    values = np.ones(30)
    other = values + 5e-5 * np.random.default_rng(0).uniform(-1, 1, 30)
    other[12:] += 2e-4
    first, second = read_run(write(tmp_path / "a", values.tolist())), read_run(write(tmp_path / "b", other.tolist()))
    assert not compare_runs(first, second).partings
    other[20:] += 1e-2
    second = read_run(write(tmp_path / "c", other.tolist()))
    assert [p.step for p in compare_runs(first, second).partings] == [20]


def test_a_single_deviating_value_is_no_parting(tmp_path):
    values = [1.0] * 30
    other = [*values[:10], 2.0, *values[11:]]
    found = compare_runs(read_run(write(tmp_path / "a", values)), read_run(write(tmp_path / "b", other)))
    assert not found.partings


def test_nan_in_one_run_is_a_difference_and_in_both_is_none(tmp_path):
    values, bad = [1.0] * 10, [1.0] * 6 + ["NaN"] * 4
    a, b = read_run(write(tmp_path / "a", values)), read_run(write(tmp_path / "b", bad))
    assert [p.step for p in compare_runs(a, b).partings] == [6]
    assert not compare_runs(b, read_run(write(tmp_path / "c", bad))).partings


def test_kinds_of_time_are_not_compared(tmp_path):
    """The runs do not declare what the kind is; an installed subscriber does."""
    runs = [read_run(write(tmp_path / str(i), [i, i], "step_seconds")) for i in range(2)]
    assert compare_runs(*runs).compared == 0


def test_different_models_are_compared_where_they_are_equal(base, tmp_path, capsys):
    other = tmp_path / "runs"
    other.mkdir()
    run = train(other, width=12)
    page = tmp_path / "diff.html"
    found = compare_runs(read_run(base), read_run(run))
    assert found.is_same_model  # the names are equal, and the values differ from the first step on
    assert found.partings[0].step == 0
    json_run = write(tmp_path / "other", noisy(1))
    assert cli.main(["diff", str(base), str(json_run), "-o", str(page)]) == 1
    assert "The runs have different models: 0 modules are common" in capsys.readouterr().out
    assert "The runs have different models." in page.read_text()


def test_the_command_writes_a_page_and_json(base, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    run = train(tmp_path / "runs", "rate")
    for directory, rate in ((base, 0.1), (run, 0.2)):
        (directory / "run.json").write_text(
            json.dumps({"config": {"lr": rate, "seed": 1}, "environment": {"torch": "2"}})
        )
    page = tmp_path / "diff.html"
    assert cli.main(["diff", str(base), str(run), "-o", str(page)]) == 1
    out = capsys.readouterr().out
    assert "The runs differ from step 20 on: " in out
    assert ["lr", "0.1", "0.2"] in [line.split() for line in out.splitlines()]
    text = page.read_text()
    assert text.count("data-heatmap=") == 2 * 4
    assert "Step 20" in text
    assert cli.main(["diff", str(base), str(run), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["config"] == {"lr": ["0.1", "0.2"]}
    assert report["partings"][0]["step"] == 20


def test_runs_of_one_name_are_told_apart_by_the_parents_that_differ(tmp_path):
    runs = [train(tmp_path / name / "run", steps=2) for name in ("first", "second")]
    _, a, b = compare_paths(*runs)
    assert (a.name, b.name) == ("first/run/run0001", "second/run/run0001")
