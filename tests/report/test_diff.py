"""The first difference between two runs is found, and noise is none."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import ikkuna
from ikkuna import cli
from ikkuna.reading import read_run
from ikkuna.report.difference import _pairs, _parting, compare_paths, compare_runs, training_order, write_diff
from ikkuna.store.quantity import Quantity
from ikkuna.store.run_directory import RunFile, write_run_file
from ikkuna.store.stored_run import SeriesValues
from ikkuna.store.values import ModuleEntry, ModuleOrder


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


def write(directory, values, kind="loss", start=0):
    directory.mkdir()
    entries = [
        {"kind": kind, "module": None, "pass": "training", "step": i, "value": v} for i, v in enumerate(values, start)
    ]
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


def test_runs_without_a_common_step_are_not_said_to_be_equal(tmp_path, capsys):
    runs = [write(tmp_path / str(start), [1.0] * 5, start=start) for start in (0, 5)]
    assert cli.main(["diff", *map(str, runs)]) == 1
    assert "The runs have no series with a common step." in capsys.readouterr().out


def test_kinds_of_time_are_not_compared(tmp_path):
    """The runs do not declare what the kind is; an installed subscriber does."""
    runs = [read_run(write(tmp_path / str(i), [i, i], "step_seconds")) for i in range(2)]
    assert compare_runs(*runs).compared == 0


@pytest.mark.parametrize("declares", [0, 1])
def test_a_kind_that_one_of_the_runs_declares_as_not_comparable_is_not_compared(declares, tmp_path):
    runs = [write(tmp_path / str(i), [i, i], "mine") for i in range(2)]
    write_run_file(runs[declares], RunFile("id", quantities={"mine": Quantity(is_comparable=False)}))
    assert compare_runs(*map(read_run, runs)).compared == 0


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
    for directory, config in ((base, {"lr": 0.1}), (run, {"lr": 0.2, "late": 3})):
        stored = {"config": {"seed": 1, **config}, "environment": {"torch": "2"}, "created": str(directory)}
        (directory / "run.json").write_text(json.dumps(stored))
    page = tmp_path / "diff.html"
    assert cli.main(["diff", str(base), str(run), "-o", str(page)]) == 1
    out = capsys.readouterr().out
    assert "The runs differ from step 20 on: " in out
    assert ["lr", "0.1", "0.2"] in [line.split() for line in out.splitlines()]
    text = page.read_text()
    assert text.count("data-heatmap=") == 2 * 4
    titles = [map_.title for pair in _pairs(*compare_paths(base, run)[1:]) for map_ in pair]
    assert [title.split(" · ")[1] for title in titles] == [f"{path.parent.name}/run0001" for path in (base, run)] * 4
    assert "Step 20" in text
    assert cli.main(["diff", str(base), str(run), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["config"], report["environment"]) == ({"lr": ["0.1", "0.2"], "late": ["—", "3"]}, {})
    assert report["partings"][0]["step"] == 20


def test_runs_of_one_name_are_told_apart_by_the_parents_that_differ(tmp_path):
    runs = [train(tmp_path / name / "run", steps=2) for name in ("first", "second")]
    _, a, b = compare_paths(*runs)
    assert (a.name, b.name) == ("first/run/run0001", "second/run/run0001")


def distance(a, b):
    """Return how far two values are apart."""
    if a == b or (a != a and b != b):
        return 0.0
    return abs(a - b) if math.isfinite(a - b) else math.inf


def first_difference(first, second, repeats, tolerance):
    """Return step and noise of the first difference that lasts, with one loop over steps, see `compare_runs`."""
    steps = sorted(first.keys() & second.keys())
    repeats = [each for each in repeats if each.keys() & first.keys()]
    noises, within = [], 0.0
    for step in steps:
        size = max(abs(value) if math.isfinite(value) else 0.0 for value in (first[step], second[step]))
        seen = [distance(first[s], each[s]) for each in repeats for s in each.keys() & first.keys() if s <= step]
        spread = max((value for value in seen if value < math.inf), default=0.0) if repeats else within
        noises.append(max(tolerance * size, 6 * spread))
        if (own := distance(first[step], second[step])) <= noises[-1]:
            within = max(within, own)
    beyond = [distance(first[s], second[s]) > noise for s, noise in zip(steps, noises, strict=True)]
    for i, step in enumerate(steps):
        if beyond[i] and 2 * sum(beyond[i : i + 3]) > len(beyond[i : i + 3]):
            return step, noises[i]
    return None


@pytest.mark.parametrize("seed", range(4))
def test_the_first_difference_is_that_of_a_loop_over_the_steps(seed):
    """Values and tolerance are binary fractions, so that differences equal the noise often."""
    draw, found_ones = random.Random(seed), 0
    values = [*[1.0] * 30, *[1.25] * 8, *[0.75] * 4, 1.5, 2.5, 2.75, 3.0, 9.0, 0.0, -1.0, math.nan, math.inf, -math.inf]

    def series():
        steps = sorted(draw.sample(range(12), draw.randint(0, 12)))
        return {step: draw.choice(values) for step in steps}

    def stored(series):
        return SeriesValues(
            np.array([*series], np.int64), np.array([*series.values()], np.float64), np.zeros(len(series))
        )

    for _ in range(400):
        a, b, repeats = series(), series(), [series() for _ in range(draw.choice([0, 0, 1, 2]))]
        tolerance = draw.choice([0.0, 0.125, 0.25])
        found = _parting("loss", "a", stored(a), stored(b), map(stored, repeats), tolerance)
        expected = first_difference(a, b, repeats, tolerance)
        assert (None if found is None else (found.step, found.noise)) == expected, (a, b, repeats, tolerance)
        if found is not None:
            assert (found.kind, found.module) == ("loss", "a")
            assert str((found.first, found.second)) == str((a[found.step], b[found.step]))
            found_ones += 1
    assert 50 < found_ones < 350


def test_differences_of_a_step_are_in_the_order_of_its_computation():
    """The network is last in the backward pass, and the first layer in front of it."""
    order = ModuleOrder([ModuleEntry(name, "Linear") for name in ("stem", "body", "head")])
    places = {"activations": (0, False), "loss": (1, False), "gradients": (2, True), "loss.x": (3, False)}
    ordered = [
        *((0, "activations", None), (0, "activations", "stem"), (0, "activations", "body"), (0, "activations", "head")),
        *((0, "loss", None), (0, "loss.testing", None), (0, "gradients", "head"), (0, "gradients", "body")),
        *((0, "gradients", "stem"), (0, "gradients", None), (0, "loss.x", None), (1, "activations", "stem")),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=lambda each: training_order(*each, order, places)) == ordered


def test_the_modules_and_series_of_two_runs_are_counted(base, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for run, names in (("a", "xyz"), ("b", "zvy")):
        entries = [{"kind": "l1", "module": name, "pass": "training", "step": 0, "value": 1.0} for name in names]
        (tmp_path / run / "values.1.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert (found.common, found.compared, found.only_first, found.only_second) == (2, 2, ["x"], ["v"])
    same = compare_runs(read_run(base), read_run(base))
    assert (same.common, same.is_same_model, same.only_first) == (4, True, [])
    other = compare_runs(read_run(base), read_run(tmp_path / "a"))
    assert (other.common, other.compared, other.only_first) == (0, 0, ["stem", "act", "body", "head"])
    assert not other.is_same_model


def test_the_page_is_written_where_it_is_wanted(tmp_path):
    runs = [write(tmp_path / name, noisy(seed)) for name, seed in (("a", 1), ("b", 2))]
    found, first, second = compare_paths(*runs)
    said = []
    assert write_diff(found, first, second, tmp_path / "page.html", said.append) == tmp_path / "page.html"
    assert said == ["drawing", ""]
    assert "<title>ikkuna: a and b" in (tmp_path / "page.html").read_text()
